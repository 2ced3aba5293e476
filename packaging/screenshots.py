"""Write screenshots of phos-tui that a forge shows as they are."""

import re
from pathlib import Path
from typing import Any

from textual.app import App

_FONTS = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace'


def write(app: App[Any], path: Path) -> None:
    """Write the screen of ``app`` as SVG, which names no font that has to be fetched."""
    picture = app.export_screenshot(title="phos-tui")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code, monospace", _FONTS)
    path.write_text(re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE))
