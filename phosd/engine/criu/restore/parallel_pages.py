"""Put large runs of pages back with threads, and spare CRIU these.

CRIU puts the pages of a process back with one thread: 1.35 GB in 0.65 s, longer than the device
memory of many programs takes. So it gets a private copy of its files, in which the lists of pages
lack the large runs (:mod:`phosd.engine.criu.images.pagemap`) and the files of pages have the rest.
When it has made all tasks, and holds them until phosd tells it to go on, threads write these runs
to the memory of the tasks (``/proc/<pid>/mem``, proc(5)), from the image's own files, beside the
load of the device memory. Nothing is checked later than before: nothing of the program runs until
these files, and the lists, have proved to be those of the image.

CRIU and the tasks run as the program's user, who may put another program in the place of a task, a
setuid one, too. A descriptor of ``mem`` stays with the memory that the process had when it was
opened; then it is looked at whether that is the user's to change.
"""

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from phosd.engine.criu.images import rseq_areas
from phosd.engine.criu.images.pagemap import (
    Pagemap,
    Run,
    areas,
    packed,
    relatives,
    unshared,
)
from phosd.engine.criu.restore.piece_copier import NotReadError, NotWrittenError, Piece, PieceCopier
from phosd.engine.criu.restore.private_copy import linked_copy, require_as_saved
from phosd.engine.criu.restore.restored_processes import RestoredProcesses
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.faults import Point, point
from phosd.engine.image.private_files import open_private
from phosd.engine.system import procfs
from phosd.engine.system.privileges import Capability
from phosd.errors import ImageCorrupt, Internal

_LEAST = 64 << 20
"""Bytes in large runs of a process for which a private copy of CRIU's files pays."""
_MOST_KEPT = 3
"""The rest, which is copied, is at most one of this many parts of them,"""
_MOST_COPIED = 1 << 30
"""and at most as many bytes, for which the host may have no room."""
_LARGEST_LIST = 8 << 20
"""Bytes of a list of pages that is worth a look: a larger one has mostly short runs."""
_NO_COPY = (errno.ENOSPC, errno.EDQUOT, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
"""No room, or no hard links on this file system, or not as many."""


@dataclass(frozen=True)
class ParallelPages:
    """The ``runs`` of the process that was saved as ``pid`` which CRIU does not put back. ``pages``
    is an open descriptor of the file with their bytes, which is called ``name``.
    """

    pid: int
    pages: int
    name: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class _Division:
    """How the pages of a process are divided: those that are ``spared``, and the list of others."""

    spared: ParallelPages
    kept: Sequence[Run]
    pagemap: Pagemap

    def apply(self, folder: Path) -> None:
        """Let CRIU find only the others in ``folder``. Raises :class:`OSError`, with nothing that
        CRIU reads changed.
        """
        number = next(n for n in count(1) if not _pages(folder, n).exists())
        path = _pages(folder, number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            rest = packed(self.kept)
            source = self.spared.pages
            pairs = zip(self.kept, rest, strict=True)
            pieces = [
                Piece(source, old.position, descriptor, new.position, old.length)
                for old, new in pairs
            ]
            with PieceCopier(pieces) as copier:
                copier.finish()
        except NotWrittenError as error:
            path.unlink()
            raise error.cause or OSError(errno.EIO, os.strerror(errno.EIO)) from error
        except NotReadError as error:
            raise _unreadable(self.spared, error) from error
        finally:
            os.close(descriptor)
        Pagemap(self.pagemap.magic, number, tuple(rest), plain=True).write(
            _list(folder, self.spared.pid)
        )


@contextmanager
def parallel_pages(
    tree: SavedTree, *, private: bool = False
) -> Iterator[tuple[SavedTree, Sequence[ParallelPages]]]:
    """Yield the tree with CRIU's files as they are for a restore in which CRIU is spared large runs
    of pages, and these; none if there are few, or no room for the rest beside the image.

    ``private``: the tree's folder is a private copy already. Raises :class:`ImageCorrupt`, and
    :class:`Internal` if CRIU did not write a file.
    """
    with ExitStack() as stack:
        divisions = _divisions(tree, stack)
        copy = tree
        if divisions and not private:
            try:
                copy = stack.enter_context(linked_copy(tree))
            except OSError as error:
                if error.errno not in _NO_COPY:
                    raise
                divisions = []
        spared = []
        for division in divisions:
            try:
                division.apply(copy.folder)
            except OSError as error:
                if error.errno not in _NO_COPY:
                    raise
                break  # CRIU puts the others back
            spared.append(division.spared)
        yield copy, spared


def _divisions(tree: SavedTree, opened: ExitStack) -> list[_Division]:
    """Return how pages are divided of each process with many in large runs."""
    sizes = {file.path: file.size for file in tree.record.files}
    if max((s for name, s in sizes.items() if name.startswith("pages-")), default=0) < _LEAST:
        return []
    related = relatives(tree.folder / "pstree.img")
    # CRIU has told the kernel of these when it holds the tasks, and the kernel has written to them.
    registered: dict[int, list[int]] = {}
    for area in rseq_areas.areas(tree.folder):
        registered.setdefault(area.process, []).append(area.start)
    found = []
    for process in tree.processes:
        path = _list(tree.folder, process.pid)
        if 0 < sizes.get(path.name, 0) <= _LARGEST_LIST:
            relations = related.get(process.pid, ())
            kept_at = registered.get(process.pid, ())
            division = _division(tree, process.pid, relations, kept_at, opened)
            if division is not None:
                found.append(division)
    return found


def _division(
    tree: SavedTree,
    pid: int,
    related: Collection[int],
    kept_at: Collection[int],
    opened: ExitStack,
) -> _Division | None:
    path, mm = _list(tree.folder, pid), _mappings(tree.folder, pid)
    pagemap = Pagemap.read(path)
    if pagemap.byte_count < _LEAST:
        return None
    for file in (path, mm):
        require_as_saved(tree, file.name)
    if not pagemap.plain:
        return None
    theirs = (_mappings(tree.folder, each) for each in related)
    shared = [area for each in theirs if each.exists() for area in areas(each)]
    spared, kept = pagemap.divided(unshared(areas(mm), shared), kept_at)
    byte_count = sum(run.length for run in spared)
    rest = pagemap.byte_count - byte_count
    few = byte_count < max(_LEAST, _MOST_KEPT * rest) or rest > _MOST_COPIED
    if few or not kept:  # CRIU looks at the first of a list before it asks if there is one
        return None
    pages = _pages(tree.folder, pagemap.pages)
    descriptor = open_private(pages, os.O_RDONLY)
    opened.callback(os.close, descriptor)
    if os.fstat(descriptor).st_size < pagemap.byte_count:
        raise ImageCorrupt(
            f"{pages} is shorter than the pages of process {pid}",
            hint="restore another image; this one is damaged",
        )
    return _Division(ParallelPages(pid, descriptor, pages.name, spared), kept, pagemap)


class ParallelPageLoader(CriuPart):
    """Writes these pages to the processes that a restore has ``made`` as ``owner``, with these
    ``capabilities``. Leaving the context stops it.
    """

    def __init__(
        self,
        spared: Sequence[ParallelPages],
        made: RestoredProcesses,
        owner: Owner,
        capabilities: Collection[Capability],
    ) -> None:
        self._spared = spared
        self._processes = made
        self._owner = owner
        self._capabilities = capabilities
        self._opened = ExitStack()
        self._copier: PieceCopier | None = None
        self._targets: dict[int, tuple[ParallelPages, int]] = {}
        """By descriptor of its memory, what a process lacks, and its pid now."""

    def made(self) -> bool:
        """Return whether all is written. CRIU must hold the processes, from the first call on.

        Raises :class:`Internal` if it cannot be written.
        """
        if not self._spared:
            return True
        if self._copier is None:
            point(Point.RESTORE_PAGES)
            pieces = self._pieces(self._processes.ids())
            self._copier = self._opened.enter_context(PieceCopier(pieces))
        try:
            return self._copier.done()
        except NotWrittenError as error:
            raise self._unwritable(error) from error
        except NotReadError as error:
            spared, _ = self._targets[error.piece.target]
            raise _unreadable(spared, error) from error

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _pieces(self, ids: Mapping[int, int]) -> list[Piece]:
        there = {process.pid for process in self._processes.found(ids)}
        pieces = []
        for spared in self._spared:
            if spared.pid not in there:
                raise Internal(
                    f"criu restore did not make process {spared.pid}, or it has ended",
                    hint="somebody with its user's rights has ended it; try again",
                )
            pid = ids[spared.pid]
            memory = self._memory_of(pid)
            self._targets[memory] = spared, pid
            pieces += [
                Piece(spared.pages, run.position, memory, run.address, run.length)
                for run in spared.runs
            ]
        return pieces

    def _memory_of(self, pid: int) -> int:
        """Open the memory of a process, which must be the owner's to change."""
        try:
            process = os.open(procfs.PROC / str(pid), os.O_RDONLY | os.O_DIRECTORY)
            self._opened.callback(os.close, process)
            memory = os.open("mem", os.O_WRONLY, dir_fd=process)
            self._opened.callback(os.close, memory)
            # Through the folder: its pid may be another's by now.
            rights = procfs.credentials_in(procfs.PROC / "self/fd" / str(process))
            owner = os.fstat(memory).st_uid
        except (FileNotFoundError, ProcessLookupError) as error:
            raise Internal(
                f"the memory of process {pid} cannot be put back: it has ended",
                hint="somebody with its user's rights has ended it; try again",
            ) from error
        except OSError as error:
            raise Internal(
                f"the memory of process {pid} cannot be put back: {error.strerror}",
                hint="phosd needs CAP_SYS_PTRACE, and a security module (AppArmor, SELinux) must "
                "let it write to the memory of processes",
            ) from error
        uid, gid = self._owner.uid, self._owner.gid
        allowed = sum(1 << each for each in self._capabilities)
        # Root's programs may change all others.
        plain = rights.gids == (gid,) * 4 and not rights.permitted & ~allowed
        # The kernel gives the file to root if the memory is not its user's to change, as after a
        # setuid program: proc(5), PR_SET_DUMPABLE.
        theirs = rights.uids == (uid,) * 4 and owner == uid
        if not theirs or not (plain or self._owner.is_root):
            raise Internal(
                f"process {pid} is not the one that criu restore has made: it has other rights",
                hint="somebody with its user's rights has changed it; try again",
            )
        return memory

    def _unwritable(self, error: NotWrittenError) -> Internal:
        _, pid = self._targets[error.piece.target]
        why = error.cause.strerror if error.cause is not None else "it has ended"
        return Internal(
            f"the memory of process {pid} cannot be put back at {error.at:#x}: {why}",
            hint="somebody with its user's rights has ended or changed it, or the machine's memory "
            "is full (`dmesg` tells); try again",
        )


def _unreadable(spared: ParallelPages, error: NotReadError) -> Internal:
    why = error.cause.strerror if error.cause is not None else "the file ends there"
    return Internal(
        f"{spared.name}, the saved memory of process {spared.pid}, cannot be read at byte"
        f" {error.at}: {why}",
        hint="see `dmesg` for errors of its disk; restore another image",
    )


def _list(folder: Path, pid: int) -> Path:
    return folder / f"pagemap-{pid}.img"


def _mappings(folder: Path, pid: int) -> Path:
    return folder / f"mm-{pid}.img"


def _pages(folder: Path, number: int) -> Path:
    return folder / f"pages-{number}.img"
