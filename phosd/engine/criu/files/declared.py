"""Look through the places that a program has declared as its own, with the owner's rights."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phosd.engine.criu.files.file_orders import Answer, Found
from phosd.engine.criu.files.names_beside import NEWER, is_beside
from phosd.engine.image.cpu_manifest import DeclaredState

MOST = 900
"""Files that are opened, at most: fewer than the descriptors that a process may have."""
_MOST_SEEN = 10 * MOST
"""Files, folders and links, at most."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_open: list[int] = []
"""The files of the last orders."""


def opened_anew(patterns: tuple[str, ...]) -> Answer:
    """Open the files, and close those of the call before; tell of all that is there."""
    while _open:
        os.close(_open.pop())
    found: dict[tuple[int, int], Found] = {}
    state = DeclaredState(patterns, (), {}, {})
    files = list[str]()
    for path in all_in(patterns):
        if len(files) + len(state.folders) + len(state.links) == _MOST_SEEN:
            return Answer((f"there is more than {_MOST_SEEN} of it in {', '.join(patterns)}",))
        with suppress(OSError):  # it has gone
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                state.folders[path] = stat.S_IMODE(status.st_mode)
                continue
            if stat.S_ISLNK(status.st_mode):
                state.links[path] = str(Path(path).readlink())
                continue
            files.append(path)
            descriptor = os.open(path, _FLAGS)
            _open.append(descriptor)
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            if not stat.S_ISREG(status.st_mode) or key in found:
                os.close(_open.pop())
            elif len(found) == MOST:
                return Answer((f"there are more than {MOST} files in {', '.join(patterns)}",))
            else:
                found[key] = Found(path, descriptor)
    there = DeclaredState(patterns, tuple(files), state.folders, state.links)
    return Answer(found=tuple(found.values()), state=there)


def made_since(state: DeclaredState) -> Iterator[str]:
    """Yield what the owner has made in the places since, as far as it can be renamed: a new folder,
    not also what is in it.
    """
    known = {*state.files, *state.folders, *state.links}
    places, above = places_of(state.patterns), ""
    for path in all_in(state.patterns):
        if path in known or (above and path.startswith(above)):
            continue
        above = f"{path}/"
        movable = _is_own(path) and not os.path.ismount(path) and is_among_own(path, places)
        if movable and os.access(Path(path).parent, os.W_OK | os.X_OK):
            yield path


def places_of(patterns: tuple[str, ...]) -> set[str]:
    """Return the paths that patterns name, and those that they stand for."""
    return {place for each in patterns for place in (os.path.normpath(each), *_places(each))}


def is_among_own(path: str, places: set[str]) -> bool:
    """Return whether all folders between one of the ``places`` and a path in it are the owner's:
    those of others may become links that lead anywhere.
    """
    folders = [path, *map(str, Path(path).parents)]
    inside = next((at for at, each in enumerate(folders) if each in places), len(folders))
    return all(map(_is_own, folders[1:inside]))


def _is_own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def left_aside(state: DeclaredState, mark: str) -> list[str]:
    """Return what was put aside with this ``mark``, by the names that it had before. A process that
    was killed has told nobody of it.
    """
    ending, found = f"{NEWER}{mark}", list[str]()
    for folder in {*map(Path, state.folders), *(Path(each).parent for each in state.patterns)}:
        with suppress(FileNotFoundError, PermissionError):
            beside = (str(path) for path in folder.iterdir() if path.name.endswith(ending))
            found += (path.removesuffix(ending) for path in beside)
    return sorted(found)


def all_in(patterns: tuple[str, ...]) -> Iterator[str]:
    """Yield what the patterns stand for and what is in such folders, each path once, a folder right
    before what is in it; without what restores have left.
    """
    seen = set[str]()
    for pattern in patterns:
        with suppress(PermissionError):  # as far as the folders may be seen
            for place in _places(pattern):
                for path in _below(place):
                    if path not in seen:
                        seen.add(path)
                        yield path


def _places(pattern: str) -> list[str]:
    itself = os.path.normpath(pattern)
    if os.path.lexists(itself):
        return [itself]
    found = Path("/").glob(pattern.lstrip("/"))
    return sorted(str(path) for path in found if not is_beside(path.name))


def _below(place: str) -> Iterator[str]:
    """Yield ``place``, and what is in it if it is a folder, or a link to one."""
    left = [Path(place)]
    while left:
        path = left.pop()
        yield str(path)
        if path.is_dir() and (str(path) == place or not path.is_symlink()):
            with suppress(OSError):
                left += sorted((p for p in path.iterdir() if not is_beside(p.name)), reverse=True)
