"""Compare screens with snapshots in text form: the characters, then the runs of each style.

With ``PHOS_WRITE_SNAPSHOTS=1`` the files are written instead of compared. A screen that differs is
saved as an SVG picture in ``build/snapshots``.
"""

import itertools
import os
from pathlib import Path

from rich.style import Style
from textual.pilot import Pilot
from textual.widgets import Input

FOLDER = Path(__file__).parents[2] / "unit" / "tui" / "snapshots"
PICTURES = Path(__file__).parents[3] / "build" / "snapshots"
_TRIES = 100


async def compare(pilot: Pilot[None], name: str) -> None:
    """Check that the screen, once it no longer changes, equals the snapshot of this name."""
    found = await settled(pilot)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("PHOS_WRITE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(found)
        return
    assert path.exists(), f"there is no snapshot {name}; PHOS_WRITE_SNAPSHOTS=1 writes it"
    if found != path.read_text():
        PICTURES.mkdir(parents=True, exist_ok=True)
        pilot.app.save_screenshot(f"{name}.svg", str(PICTURES))
    assert found.splitlines() == path.read_text().splitlines(), f"see {PICTURES / name}.svg"


async def compare_all(pilot: Pilot[None], name: str) -> None:
    """Compare the screen small and large. The other theme has the same characters in colours that
    ``test_readable.py`` looks at.
    """
    for width, height in ((80, 24), (140, 48)):
        await pilot.resize_terminal(width, height)
        await compare(pilot, f"{name}-{width}x{height}")


async def settled(pilot: Pilot[None]) -> str:
    """Return the screen as text once two reads in a row agree. No cursor blinks meanwhile: on a
    busy machine both reads may be of a moment in which it does not show.
    """
    for field in pilot.app.screen.query(Input):
        field.cursor_blink = False
    before = ""
    for _ in range(_TRIES):
        await pilot.pause()
        found = describe(pilot)
        if found == before:
            return found
        before = found
        await pilot.pause(0.02)
    raise AssertionError(f"the screen does not come to rest:\n{before}")


def text(pilot: Pilot[None]) -> str:
    """Return the characters on the screen."""
    lines = pilot.app.screen._compositor.render_strips()
    return "\n".join(line.text.rstrip() for line in lines) + "\n"


def describe(pilot: Pilot[None]) -> str:
    """Return the characters, then the runs of styles of each line as letters, then a legend."""
    letters: dict[str, str] = {}
    runs = []
    for line in pilot.app.screen._compositor.render_strips():
        cells = [(_look(s.style), s.cell_length) for s in line if s.cell_length]
        parts = []
        for look, group in itertools.groupby(cells, key=lambda cell: cell[0]):
            name = letters.setdefault(look, _letter(len(letters)))
            parts.append(f"{name}{sum(length for _, length in group)}")
        runs.append(" ".join(parts))
    legend = [f"{letter} = {look}" for look, letter in letters.items()]
    return text(pilot) + "\n".join(["---", *runs, "---", *legend]) + "\n"


def _letter(number: int) -> str:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return alphabet[number] if number < 26 else alphabet[number // 26 - 1] + alphabet[number % 26]


def _look(style: Style | None) -> str:
    """Describe colours and attributes, omitting those that terminals do not show."""
    if style is None:
        return "plain"
    names = ("bold", "dim", "italic", "underline", "reverse", "strike")
    attributes = [name for name in names if getattr(style, name)]
    colours = [c.get_truecolor().hex if c else "none" for c in (style.color, style.bgcolor)]
    return " ".join([" on ".join(colours), *attributes])
