"""Compare a tree's files with their records, cut, replace, undo, with the rights of the process.

Only the file worker's process does this: each path is one that a user named.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phosd.engine.criu.files.file_bytes import copy_sparse, digest
from phosd.engine.criu.files.file_orders import (
    Answer,
    Change,
    Copied,
    Hashed,
    Inode,
    Orders,
    Output,
    Outputs,
    Policy,
)
from phosd.engine.criu.images.build_ids import build_id
from phosd.engine.image.cpu_manifest import MappedFile, MemoryFile, OpenFile

_OUTPUT = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
"""The form of the folder names that ``phos run`` creates."""


def perform(orders: Orders) -> Answer:
    """Carry out the orders; if one cannot be, change nothing, and say why."""
    if orders.outputs is not None:
        try:
            return Answer(outputs=tuple(_outputs(orders.outputs)))
        except OSError as error:
            return Answer((f"{orders.outputs.folder}: {error.strerror}",))
    if orders.hashed or orders.folders:
        closed = (path for path in orders.folders if not os.access(path, os.W_OK | os.X_OK))
        return Answer(digests=tuple(map(_hash, orders.hashed)), closed=tuple(closed))
    inodes = tuple(_identify(orders.identified))
    for change in reversed(orders.undo):
        _undo(change)
    for change in orders.settle:
        if change.cut_to is None and change.beside and not change.folder:
            Path(change.beside).unlink()
    problems: list[str] = []
    cuts: list[OpenFile] = []
    copied = {each.path for each in orders.copies}
    made = [path for path in orders.outputs_made if not os.path.lexists(path)]
    for file in orders.open_files:
        if file.path in made:
            continue
        problem, cut = _examine(file, Policy.CUT if file.path in copied else orders.policy)
        problems += [problem] if problem else []
        cuts += [file] if cut and file.path not in copied else []
    problems += filter(None, map(_examine_copy, orders.copies))
    problems += filter(None, map(_examine_memory, orders.memory_files))
    problems += filter(None, map(_examine_mapped, orders.mapped_files))
    problems += filter(None, map(_examine_needed, orders.needed))
    problems += filter(None, map(_examine_output, made))
    if problems or not orders.apply:
        return Answer(tuple(problems), inodes=inodes)
    changes: list[Change] = []
    try:
        for file in {file.path: file for file in cuts}.values():
            changes.append(_cut(file, orders.mark))
        for memory, source in zip(orders.memory_files, orders.sources, strict=True):
            changes.append(_put_back(memory, source, orders.mark))
        for path in orders.needed:
            _make(Path(path), changes)
        for path in made:
            _make_output(Path(path), changes)
        for copy in orders.copies:
            _make_copy(copy, changes)
    except OSError as error:
        for change in reversed(changes):
            _undo(change)
        return Answer((f"{error.filename or 'a file'}: {error.strerror}",))
    return Answer(changes=tuple(changes))


def _hash(file: Hashed) -> str:
    try:
        with Path(file.path).open("rb", buffering=0) as opened:
            return digest(opened.fileno(), file.size)
    except OSError:  # a program may write what it may not read
        return ""


def _identify(paths: Iterable[str]) -> Iterator[Inode]:
    for path in paths:
        with suppress(OSError):  # the comparison says so
            status = Path(path).lstat()
            yield Inode(path, status.st_dev, status.st_ino)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """Open a regular file, without waiting if a fifo has replaced it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no regular file any more", path)
        yield descriptor
    finally:
        os.close(descriptor)


def _examine(file: OpenFile, policy: Policy) -> tuple[str, bool]:
    """Return what is wrong with a file (empty: nothing), and whether it must be cut."""
    access = os.O_RDONLY if not file.write_only or file.content else os.O_WRONLY
    try:
        with _opened(file.path, access) as descriptor:
            now = os.fstat(descriptor)
            if file.appended:
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
    return f"{file.path} has grown by {grown} bytes (files=cut cuts it, keeping them beside)", False


def _examine_memory(file: MemoryFile) -> str:
    """Check that a memory file, if it exists, is the owner's to replace."""
    try:
        with _opened(file.path, os.O_RDWR):
            return ""
    except FileNotFoundError:
        folder = str(Path(file.path).parent)
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"
    except OSError as error:
        return f"{file.path}: {error.strerror}"


def _examine_mapped(file: MappedFile) -> str:
    """Check that a program or library exists and has its size, and its build-id if it is known."""
    try:
        same = Path(file.path).stat().st_size == file.size
        if same and file.build_id and os.access(file.path, os.R_OK):
            with _opened(os.path.realpath(file.path), os.O_RDONLY) as descriptor:
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


def _make(folder: Path, changes: list[Change]) -> None:
    """Make a folder, and those above it, for their owner alone; add them to ``changes``."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700)
        changes.append(Change(str(each), "", folder=True))


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


def _make_output(path: Path, changes: list[Change]) -> None:
    _make(path.parent, changes)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(path, flags, 0o600))
    changes.append(Change(str(path), ""))


def _examine_copy(file: Copied) -> str:
    """Return why a file cannot be copied; empty if it can."""
    if Path(file.target).is_symlink() or Path(file.target).exists():
        return f"{file.target}, to which a clone was to write, exists"
    folder = Path(file.target).parent
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def _make_copy(file: Copied, changes: list[Change]) -> None:
    """Copy a file, as far as it was there at the checkpoint; a log may be shorter by now."""
    with _opened(file.path, os.O_RDONLY) as source:
        status = os.fstat(source)
        target = os.open(file.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        changes.append(Change(file.target, ""))
        try:
            os.fchmod(target, stat.S_IMODE(status.st_mode))
            copy_sparse(source, target, min(file.size, status.st_size))
        finally:
            os.close(target)


def _cut(file: OpenFile, mark: str) -> Change:
    beside = f"{file.path}.phos-tail-{mark}"
    with _opened(file.path, os.O_RDWR) as descriptor:
        size = os.fstat(descriptor).st_size
        tail = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _copy(descriptor, file.size, tail, size - file.size)
            os.fsync(tail)
        except OSError:
            Path(beside).unlink()
            raise
        finally:
            os.close(tail)
        os.ftruncate(descriptor, file.size)
    return Change(file.path, beside, cut_to=file.size)


def _copy(source: int, offset: int, target: int, count: int) -> None:
    while count > 0:
        moved = os.sendfile(target, source, offset, count)
        if moved == 0:
            raise OSError(0, "it shrank while it was read")
        offset, count = offset + moved, count - moved


def _put_back(file: MemoryFile, source: int, mark: str) -> Change:
    """Put the saved bytes at the path as a new file; keep the old file beside it until the end."""
    fresh, beside = f"{file.path}.phos-new-{mark}", f"{file.path}.phos-old-{mark}"
    target = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        copy_sparse(source, target, file.size)
        os.fchmod(target, file.mode)
    except OSError:
        Path(fresh).unlink()
        raise
    finally:
        os.close(target)
    existed = Path(file.path).exists()
    if existed:
        os.link(file.path, beside, follow_symlinks=False)
    Path(fresh).rename(file.path)
    return Change(file.path, beside if existed else "")


def _undo(change: Change) -> None:
    if change.cut_to is not None:
        with _opened(change.path, os.O_WRONLY) as file, _opened(change.beside, os.O_RDONLY) as tail:
            size = os.fstat(tail).st_size
            os.lseek(file, change.cut_to, os.SEEK_SET)
            _copy(tail, 0, file, size)
            os.ftruncate(file, change.cut_to + size)  # what the restored program wrote meanwhile
        Path(change.beside).unlink()
    elif change.beside:
        Path(change.beside).rename(change.path)
    elif change.folder:
        with contextlib.suppress(OSError):  # somebody else uses it by now
            Path(change.path).rmdir()
    else:
        Path(change.path).unlink(missing_ok=True)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _outputs(wanted: Outputs) -> Iterator[Output]:
    """Yield the user's own old folders; remove them if ordered."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        runs = os.open(wanted.folder, flags)
    except FileNotFoundError:
        return
    for name in wanted.remove or sorted(_names(runs)):
        if not _OUTPUT.fullmatch(name):
            continue
        try:
            folder = os.open(name, flags, dir_fd=runs)
        except OSError:  # a link, or it no longer exists
            continue
        try:
            files = _names(folder)
            found = [os.stat(file, dir_fd=folder, follow_symlinks=False) for file in files]
            itself = os.fstat(folder)
            plain = all(stat.S_ISREG(status.st_mode) for status in found)
            written = max(status.st_mtime for status in (itself, *found))
            if not plain or itself.st_uid != os.geteuid() or written >= wanted.before:
                continue
            if wanted.remove:
                for file in files:
                    os.unlink(file, dir_fd=folder)
                os.rmdir(name, dir_fd=runs)
            yield Output(name, sum(status.st_size for status in found), written)
        except OSError:  # it is in use; a later call may succeed
            continue
        finally:
            os.close(folder)
