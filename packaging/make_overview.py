"""Draw docs/screens/overview.svg: the first screen of phos-tui for a full node.

The screen is phos-tui's; the node is an example, whose programs and figures are made up.
"""

import asyncio
import sys
from pathlib import Path

import screenshots

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the example node is that of the tests

from phosd.tui.app import PhosApp  # noqa: E402
from tests.support.tui.full_node import full_node  # noqa: E402

PICTURE = ROOT / "docs/screens/overview.svg"
_SIZE = (150, 32)
_SETTLED = 1.5


async def _draw() -> None:
    node, _ = full_node()
    node.name = "gpu7"
    app = PhosApp(node)
    app.animation_level = "none"
    async with app.run_test(size=_SIZE) as pilot:
        await pilot.pause(_SETTLED)
        screenshots.write(app, PICTURE)


if __name__ == "__main__":
    asyncio.run(_draw())
    print(PICTURE.relative_to(ROOT))
