"""Compare a tree's files with what was recorded of them, and say what is to be done.

Only the file worker's process does this: each path is one that a user named.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.criu.files.declared import is_among_own, made_since, places_of
from phosd.engine.criu.files.file_bytes import digest
from phosd.engine.criu.files.file_orders import Copied, Orders, Policy
from phosd.engine.criu.files.names_beside import NEWER, TAIL
from phosd.engine.criu.files.sqlite import is_database
from phosd.engine.criu.images.build_ids import build_id
from phosd.engine.image.cpu_manifest import (
    DeclaredState,
    MappedFile,
    MemoryFile,
    OpenFile,
    WrittenFile,
)
from phosd.units import human_bytes

_STEP = 1 << 20


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Open a regular file, without waiting if a fifo has replaced it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no regular file any more", path)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass
class Comparison:
    """What is wrong with the files, and what is to be done: files to be ``cut``, to be put ``back``
    from their saved bytes, and to be ``made`` anew. In declared places what was made since is
    put ``aside``, ``folders`` that are gone are made, and ``links`` point again to what they did.
    Files that have changed and stay ``as_is`` are told, and those only appended to that are
    ``shorter`` now.
    """

    problems: list[str] = field(default_factory=list)
    cut: dict[str, OpenFile] = field(default_factory=dict)
    back: list[tuple[WrittenFile, int]] = field(default_factory=list)
    made: list[OpenFile] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    folders: list[tuple[str, int]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    as_is: list[str] = field(default_factory=list)
    shorter: list[str] = field(default_factory=list)

    def told(self) -> Iterator[str]:
        """Yield what is done with them, in words."""
        for path in self.cut:
            yield f"{path} is cut to its length; the rest stays in {path}{TAIL}*"
        for file, source in self.back:
            if os.path.lexists(file.path):
                yield f"{file.path} is put back; the newer one stays as {file.path}{NEWER}*"
            elif is_database(source) and not file.declared:
                yield (
                    f"{file.path}, which is gone, is put back as another file, to which SQLite "
                    "will not write: the program must open it anew"
                )
            else:
                yield f"{file.path}, which is gone, is put back"
        for output in self.made:
            yield f"{output.path}, which is gone, is made anew, empty"
        for path in self.shorter:
            yield f"{path} is shorter than at the checkpoint, and is continued at its end"
        for path in self.aside:
            yield f"{path} was made since, and stays as {path}{NEWER}*"
        for path, target in self.links:
            yield f"{path} is a link to {target} again"
        for path in self.as_is:
            yield f"{path} has changed, and the program goes on with it as it is"


def compared(orders: Orders) -> Comparison:
    """Compare the files with what was recorded of them."""
    found = Comparison()
    copied = {each.path for each in orders.copies}
    saved = saved_bytes(orders)
    found.made = [file for file in orders.outputs_made if not os.path.lexists(file.path)]
    made = {file.path for file in found.made}
    back = {}
    for file in orders.open_files:
        path = file.path
        if path in made or (path in copied and path in saved):
            continue
        problem, cut = _examine(
            file, Policy.CUT if path in copied | saved.keys() else orders.policy
        )
        if problem and path in saved:
            back[path] = saved[path]
        elif problem:
            found.problems.append(problem)
        elif cut and path not in copied:
            found.cut[path] = file
        elif file.appended and path not in copied and _is_shorter(file):
            found.shorter.append(path)
        elif orders.policy is Policy.AS_IS and not file.appended and not _is_as_saved(file):
            found.as_is.append(path)
    for path, (written, source) in saved.items():
        if path in copied or path in back:
            continue
        if written.declared and _is_as_saved(written):
            continue
        if (written.mapped or written.declared) and not _has_bytes(written, source):
            back[path] = written, source
    found.back = [*back.values()]
    found.problems += filter(None, (_examine_back(file) for file, _ in found.back))
    found.problems += filter(None, map(_examine_copy, orders.copies))
    found.problems += filter(None, map(_examine_memory, orders.memory_files))
    others = (each for each in orders.mapped_files if each.path not in saved)
    found.problems += filter(None, map(_examine_mapped, others))
    found.problems += filter(None, map(_examine_needed, orders.needed))
    found.problems += filter(None, map(_examine_output, made))
    if orders.state is not None:
        _compare_declared(orders.state, found)
    return found


def _compare_declared(state: DeclaredState, found: Comparison) -> None:
    found.aside = list(made_since(state))
    places = places_of(state.patterns)
    gone = [path for path in sorted(state.folders) if not os.path.lexists(path)]
    found.folders = [(path, state.folders[path]) for path in gone if _may_be_made(path, places)]
    changed = (each for each in sorted(state.links.items()) if not _points_to(*each))
    found.links = [each for each in changed if _may_be_made(each[0], places)]


def _may_be_made(path: str, places: set[str]) -> bool:
    """Return whether something may be put at a path, of which the folders may be gone, too."""
    there = Path(path)
    while not os.path.lexists(there.parent):
        there = there.parent
    return is_among_own(str(there), places)


def _points_to(path: str, target: str) -> bool:
    try:
        return str(Path(path).readlink()) == target
    except OSError:
        return False


def saved_bytes(orders: Orders) -> dict[str, tuple[WrittenFile, int]]:
    """Return the written files, each with the descriptor of its saved bytes, by path."""
    files = zip(orders.written_files, orders.written, strict=True)
    return {file.path: (file, source) for file, source in files}


def _examine(file: OpenFile, policy: Policy) -> tuple[str, bool]:
    """Return what is wrong with a file (empty: nothing), and whether it must be cut."""
    access = os.O_RDONLY if not file.write_only or file.content else os.O_WRONLY
    try:
        with opened(file.path, access) as descriptor:
            now = os.fstat(descriptor)
            if file.appended or policy is Policy.AS_IS:
                return "", False
            return _compare(file, descriptor, now, policy)
    except FileNotFoundError:
        return f"{file.path} is gone", False
    except OSError as error:
        return f"{file.path}: {error.strerror}", False


def _compare(
    file: OpenFile, descriptor: int, now: os.stat_result, policy: Policy
) -> tuple[str, bool]:
    if (now.st_size, now.st_mtime_ns) == (file.size, file.mtime_ns):
        return "", False
    if not file.write_only:
        return f"{file.path} has changed, and the program reads it", False
    if now.st_size < file.size:
        return f"{file.path} has shrunk from {file.size} to {now.st_size} bytes", False
    if file.content is None:
        return f"{file.path} has changed, and no digest of it was saved", False
    if digest(descriptor, file.size) != file.content:
        return f"{file.path} was overwritten", False
    if now.st_size == file.size:
        return "", False
    if policy is Policy.CUT:
        return "", True
    grown = now.st_size - file.size
    return (
        f"{file.path} has grown by {human_bytes(grown)} "
        "(`--files cut` cuts it, keeping them beside)",
        False,
    )


def _examine_memory(file: MemoryFile) -> str:
    """Check that a memory file, if it exists, is the owner's to replace."""
    try:
        with opened(file.path, os.O_RDWR):
            return ""
    except FileNotFoundError:
        folder = str(Path(file.path).parent)
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"
    except OSError as error:
        return f"{file.path}: {error.strerror}"


def _has_bytes(file: WrittenFile, source: int) -> bool:
    """Return whether a file has its saved bytes."""
    try:
        with opened(file.path, os.O_RDONLY) as descriptor:
            if os.fstat(descriptor).st_size != file.size:
                return False
            at = 0
            while at < file.size:
                piece = os.pread(descriptor, _STEP, at)
                if not piece or piece != os.pread(source, len(piece), at):
                    return False
                at += len(piece)
            return True
    except OSError:
        return False


def _is_shorter(file: OpenFile) -> bool:
    with suppress(OSError):  # it has just gone
        return Path(file.path).stat().st_size < file.size
    return False


def _is_as_saved(file: WrittenFile | OpenFile) -> bool:
    """Return whether a file has the size and the time that it had."""
    try:
        now = os.lstat(file.path)
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (file.size, file.mtime_ns)


def _examine_back(file: WrittenFile) -> str:
    """Return why a file cannot be put back; empty if it can."""
    try:
        with opened(file.path, os.O_RDWR) as descriptor:
            now = os.fstat(descriptor)
    except FileNotFoundError:
        return _examine_output(file.path)
    except OSError as error:
        return f"{file.path}: {error.strerror}"
    folder = Path(file.path).parent
    if now.st_nlink > 1:
        return f"{file.path} has changed, and has another name, where it would stay as it is"
    if now.st_uid != os.geteuid() or not os.access(folder, os.W_OK | os.X_OK):
        return f"{file.path} has changed, and cannot be replaced in {folder}"
    return ""


def _examine_mapped(file: MappedFile) -> str:
    """Check that a program or library exists and has its size, and its build-id if it is known."""
    try:
        same = Path(file.path).stat().st_size == file.size
        if same and file.build_id and os.access(file.path, os.R_OK):
            with opened(os.path.realpath(file.path), os.O_RDONLY) as descriptor:
                same = build_id(descriptor) == file.build_id
    except OSError as error:
        return f"{file.path}, which the program maps: {error.strerror}"
    return "" if same else f"{file.path}, which the program maps, was replaced"


def _examine_needed(path: str) -> str:
    """Return why a folder is missing and cannot be made; empty if it can, or is there."""
    there = Path(path)
    try:
        while not there.exists():
            there = there.parent
    except OSError as error:
        return f"{path}, in which the program had a socket, cannot be seen: {error.strerror}"
    if there.is_dir() and (str(there) == path or os.access(there, os.W_OK | os.X_OK)):
        return ""
    return f"{path}, in which the program had a socket, is gone and cannot be made in {there}"


def _examine_output(path: str) -> str:
    """Return why a missing file of a program's output cannot be made; empty if it can."""
    there = Path(path).parent
    while True:
        try:
            status = there.stat()
            break
        except FileNotFoundError:
            there = there.parent
        except OSError as error:
            return f"{path} is missing, and cannot be made: {error.strerror}"
    if stat.S_ISDIR(status.st_mode) and os.access(there, os.W_OK | os.X_OK):
        return ""
    return f"{path} is missing, and cannot be made in {there}"


def _examine_copy(file: Copied) -> str:
    """Return why a file cannot be copied; empty if it can."""
    if Path(file.target).is_symlink() or Path(file.target).exists():
        return f"{file.target}, to which a clone was to write, exists"
    folder = Path(file.target).parent
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"
