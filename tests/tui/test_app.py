"""The application over a node that the test leads."""

import asyncio

from phosd.tui.app import PhosApp
from tests.tui.fakes import fake_node, gpu, process


def test_the_key_c_checkpoints_the_process_under_the_cursor() -> None:
    node, link = fake_node(gpu(), process(1), process(2))

    async def run() -> None:
        app = PhosApp(node)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("down", "c")
            await pilot.pause()
            assert link.asked == [("Checkpoint", 2)]

    asyncio.run(run())
