"""Open the files of folders and patterns that a program has declared, with the owner's rights."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phosd.engine.criu.files.file_comparison import FRESH, NEWER, TAIL, UNDO
from phosd.engine.criu.files.file_orders import Answer, Found

MOST = 900
"""Files that are opened, at most: fewer than the descriptors that a process may have."""
_OURS = (FRESH, NEWER, TAIL, UNDO)
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_open: list[int] = []
"""The files of the last orders."""


def opened_anew(patterns: tuple[str, ...]) -> Answer:
    """Open the files, and close those of the call before."""
    while _open:
        os.close(_open.pop())
    found: dict[tuple[int, int], Found] = {}
    for path in (path for pattern in patterns for path in _seen(pattern)):
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError:  # it has gone, or is a link, or not theirs to read
            continue
        _open.append(descriptor)
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        if not stat.S_ISREG(status.st_mode) or key in found:
            os.close(_open.pop())
        elif len(found) == MOST:
            return Answer((f"there are more than {MOST} files in {', '.join(patterns)}",))
        else:
            found[key] = Found(path, descriptor)
    return Answer(found=tuple(found.values()))


def _seen(pattern: str) -> Iterator[str]:
    """Yield the files of a pattern, as far as their folders may be seen."""
    with suppress(PermissionError):
        yield from _files(pattern)


def _files(pattern: str) -> Iterator[str]:
    """Yield what a pattern stands for, and what is in folders, without what a restore has left."""
    itself = Path(pattern)
    places = [itself] if itself.exists() else sorted(Path("/").glob(pattern.lstrip("/")))
    for place in places:
        for path in _below(place) if place.is_dir() else [place]:
            if not any(ours in path.name for ours in _OURS):
                yield str(path)


def _below(place: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(place):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names))
