"""Compare a tree's files with their records, cut, replace, undo, with the rights of the process.

Only the file worker's process does this: each path is one that a user named.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from phosd.engine.criu.files import newer_versions, old_outputs
from phosd.engine.criu.files.attributes import attributes_of, set_attributes
from phosd.engine.criu.files.declared import all_in, left_aside, opened_anew
from phosd.engine.criu.files.file_bytes import copy_file, digest, update_file
from phosd.engine.criu.files.file_comparison import Comparison, compared, opened, saved_bytes
from phosd.engine.criu.files.file_orders import Answer, Change, Copied, Hashed, Inode, Orders
from phosd.engine.criu.files.names_beside import FRESH, NEWER, TAIL, UNDO
from phosd.engine.faults import Point, point
from phosd.engine.image.cpu_manifest import MemoryFile, OpenFile, WrittenFile


def perform(orders: Orders) -> Answer:
    """Carry out the orders; if one cannot be, change nothing, and say why."""
    if orders.outputs is not None:
        try:
            return Answer(outputs=tuple(old_outputs.found(orders.outputs)))
        except OSError as error:
            return Answer((f"{orders.outputs.folder}: {error.strerror}",))
    if orders.versions is not None:
        return Answer(versions=tuple(newer_versions.found(orders.versions)))
    if orders.declared:
        return opened_anew(orders.declared)
    if orders.hashed or orders.folders:
        closed = (path for path in orders.folders if not os.access(path, os.W_OK | os.X_OK))
        return Answer(digests=tuple(map(_hash, orders.hashed)), closed=tuple(closed))
    inodes = tuple(_identify(orders.identified))
    for file in orders.mended:
        try:
            _mend(file, orders.mark)
        except OSError as error:
            return Answer((f"{file.path}, half put back before: {error.strerror}",))
    if orders.mark and orders.state is not None:
        for path in left_aside(orders.state, orders.mark):
            _take_back(path, orders.mark)
    for change in reversed(orders.undo):
        _undo(change)
    for change in orders.settle:
        if change.cut_to is None and change.beside and not change.folder and not change.stays:
            Path(change.beside).unlink()
    found = compared(orders)
    told, back = tuple(found.told()), tuple(file.path for file, _ in found.back)
    if found.problems or not orders.apply:
        aside = tuple(_identify(all_in(tuple(found.aside))))
        return Answer(tuple(found.problems), inodes=inodes, told=told, back=back, aside=aside)
    changes: list[Change] = []
    try:
        _change(orders, found, changes)
    except OSError as error:
        for change in reversed(changes):
            _undo(change)
        return Answer((f"{error.filename or 'a file'}: {error.strerror}",))
    return Answer(changes=tuple(changes), told=told, back=back)


def _change(orders: Orders, found: Comparison, changes: list[Change]) -> None:
    """Cut, put back, make and copy; add each change to ``changes``."""
    saved = saved_bytes(orders)
    for path in found.aside:
        changes.append(_put_aside(path, orders.mark))
    for path, mode in found.folders:
        _make(Path(path), changes, mode)
    for path, target in found.links:
        if os.path.lexists(path):
            changes.append(_put_aside(path, orders.mark))
        Path(path).symlink_to(target)
        changes.append(Change(path, ""))
    for file in found.cut.values():
        changes.append(_cut(file, orders.mark))
    for written, source in found.back:
        _make(Path(written.path).parent, changes)
        changes.append(_roll_back(written, source, orders.mark))
    for memory, source in zip(orders.memory_files, orders.sources, strict=True):
        changes.append(_put_back(memory, source, orders.mark))
    for path in orders.needed:
        _make(Path(path), changes)
    for output in found.made:
        _make_output(output, changes)
    for copy in orders.copies:
        _make_copy(copy, changes, saved.get(copy.path))


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


def _make(folder: Path, changes: list[Change], mode: int = 0o700) -> None:
    """Make a folder, and those above it, for their owner alone; add them to ``changes``."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700)
        changes.append(Change(str(each), "", folder=True))
    if missing:
        folder.chmod(mode)


def _put_aside(path: str, mark: str) -> Change:
    """Give a file, folder or link another name, under which it stays."""
    beside = f"{path}{NEWER}{mark}"
    Path(path).rename(beside)
    return Change(path, beside, stays=True)


def _take_back(path: str, mark: str) -> None:
    """Undo what a process that was killed had put aside."""
    if Path(path).is_symlink():
        Path(path).unlink()
    Path(f"{path}{NEWER}{mark}").rename(path)


def _make_output(file: OpenFile, changes: list[Change]) -> None:
    _make(Path(file.path).parent, changes)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    made = os.open(file.path, flags, 0o600)
    changes.append(Change(file.path, ""))
    try:
        os.fchmod(made, file.mode & 0o777)
    finally:
        os.close(made)


def _make_copy(file: Copied, changes: list[Change], saved: tuple[WrittenFile, int] | None) -> None:
    """Copy a file as it was ``saved``; without that, as far as it was there at the checkpoint: a
    log may be shorter by now.
    """
    with opened(file.path, os.O_RDONLY) if saved is None else nullcontext(saved[1]) as source:
        status = os.fstat(source)
        mode = stat.S_IMODE(status.st_mode) if saved is None else saved[0].mode
        target = os.open(file.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        changes.append(Change(file.target, ""))
        try:
            os.fchmod(target, mode)
            copy_file(source, target, min(file.size, status.st_size))
        finally:
            os.close(target)


def _cut(file: OpenFile, mark: str) -> Change:
    beside = f"{file.path}{TAIL}{mark}"
    with opened(file.path, os.O_RDWR) as descriptor:
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
    beside = f"{file.path}.phos-old-{mark}"
    with _fresh(file.path, mark) as target:
        copy_file(source, target, file.size)
        os.fchmod(target, file.mode)
    return Change(file.path, _replace(file.path, mark, beside))


def _roll_back(file: WrittenFile, source: int, mark: str) -> Change:
    """Put the saved bytes at the path; what is there stays beside it. The very file that the
    program had is written in place: it may know it by its inode.
    """
    beside = f"{file.path}{NEWER}{mark}"
    try:
        with opened(file.path, os.O_RDWR) as descriptor:
            if os.fstat(descriptor).st_ino == file.inode:
                return _write_in_place(descriptor, file, source, mark)
    except FileNotFoundError:
        pass
    with _fresh(file.path, mark) as target:
        copy_file(source, target, file.size)
        _describe(target, file)
    return Change(file.path, _replace(file.path, mark, beside), stays=True)


def _write_in_place(descriptor: int, file: WrittenFile, source: int, mark: str) -> Change:
    """Give the open file its saved bytes. Whatever ends this process, the file is whole, or what it
    was is, under a name that :func:`_mend` knows.
    """
    undo, beside = f"{file.path}{UNDO}{mark}", f"{file.path}{NEWER}{mark}"
    with _fresh(file.path, mark) as newer:
        _copy_whole(descriptor, newer)
        os.fsync(newer)
    point(Point.FILES_BESIDE)
    Path(f"{file.path}{FRESH}{mark}").rename(undo)
    _sync_folder(file.path)  # before anything of the file changes
    try:
        os.ftruncate(descriptor, file.size)
        point(Point.FILES_FILL)
        update_file(source, descriptor, file.size)
        _describe(descriptor, file)
    except OSError:
        _give_back(file.path, undo)
        raise
    point(Point.FILES_FILLED)
    Path(undo).rename(beside)
    return Change(file.path, beside, stays=True, in_place=True)


def _give_back(path: str, undo: str) -> None:
    """Give a file the bytes that it had before it was written in place."""
    try:
        with opened(path, os.O_RDWR) as file, opened(undo, os.O_RDONLY) as newer:
            os.ftruncate(file, 0)  # what is a hole in the newer one is not written
            _copy_whole(newer, file)
            os.fsync(file)
    except FileNotFoundError:
        Path(undo).rename(path)
    else:
        Path(undo).unlink()


def _mend(file: WrittenFile, mark: str) -> None:
    """Undo what a process that was killed had half done with a file, and all that it had done with
    this ``mark``.
    """
    path = Path(file.path)
    try:
        names = [each.name for each in path.parent.iterdir() if each.name.startswith(path.name)]
    except OSError:
        return  # the comparison says so
    replaced = str(path.parent / f"{path.name}{NEWER}{mark}")
    for name in names:
        beside, what = str(path.parent / name), name.removeprefix(path.name)
        if what.startswith(UNDO):
            _give_back(file.path, beside)
        elif what.startswith(FRESH) and stat.S_ISREG(os.lstat(beside).st_mode):
            Path(beside).unlink()
        elif what.startswith(NEWER) and _is_same(beside, file.path):
            Path(beside).unlink()  # it was about to be replaced
        elif mark and beside == replaced:
            _put_newer_back(file, beside, mark)


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except FileNotFoundError:
        return False


def _put_newer_back(file: WrittenFile, beside: str, mark: str) -> None:
    if Path(file.path).exists() and Path(file.path).stat().st_ino == file.inode:
        undo = f"{file.path}{UNDO}{mark}"
        Path(beside).rename(undo)
        _give_back(file.path, undo)
    else:
        Path(beside).rename(file.path)


def _sync_folder(path: str) -> None:
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _describe(target: int, file: WrittenFile) -> None:
    """Give an open file the group, the mode, the attributes and the time that were saved."""
    if os.fstat(target).st_gid != file.gid:
        os.fchown(target, -1, file.gid)
    set_attributes(target, file.attributes)
    os.fchmod(target, file.mode)
    os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
    os.fsync(target)


def _copy_whole(source: int, target: int) -> None:
    """Give an empty open file the bytes, the mode, the attributes and the time of another."""
    now = os.fstat(source)
    copy_file(source, target, now.st_size)
    set_attributes(target, attributes_of(source))
    os.fchmod(target, stat.S_IMODE(now.st_mode))
    os.utime(target, ns=(now.st_mtime_ns, now.st_mtime_ns))


@contextmanager
def _fresh(path: str, mark: str) -> Iterator[int]:
    """Make a new file beside ``path``, which :func:`_replace` puts there."""
    target = os.open(f"{path}{FRESH}{mark}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield target
    except OSError:
        Path(f"{path}{FRESH}{mark}").unlink()
        raise
    finally:
        os.close(target)


def _replace(path: str, mark: str, beside: str) -> str:
    """Put the new file at ``path``. Returns the name of what was there; empty if nothing was."""
    existed = Path(path).exists()
    if existed:
        os.link(path, beside, follow_symlinks=False)
    point(Point.FILES_REPLACE)
    Path(f"{path}{FRESH}{mark}").rename(path)
    return beside if existed else ""


def _undo(change: Change) -> None:
    if change.cut_to is not None:
        with opened(change.path, os.O_WRONLY) as file, opened(change.beside, os.O_RDONLY) as tail:
            size = os.fstat(tail).st_size
            os.lseek(file, change.cut_to, os.SEEK_SET)
            _copy(tail, 0, file, size)
            os.ftruncate(file, change.cut_to + size)  # what the restored program wrote meanwhile
        Path(change.beside).unlink()
    elif change.in_place:
        beside, _, mark = change.beside.rpartition(NEWER)
        undo = f"{beside}{UNDO}{mark}"
        Path(change.beside).rename(undo)
        _give_back(change.path, undo)
    elif change.beside:
        Path(change.beside).rename(change.path)
    elif change.folder:
        with contextlib.suppress(OSError):  # somebody else uses it by now
            Path(change.path).rmdir()
    else:
        Path(change.path).unlink(missing_ok=True)
