"""A tree's files at a restore: compared with their records, prepared, and put back if it fails."""

import contextlib
import os
import secrets
from collections.abc import Sequence
from typing import Self

import msgspec

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_worker import Change, Inode, Orders, Policy, Worker
from phosd.engine.criu.images.socket_folders import socket_folders
from phosd.engine.criu.restore.clone import Clone
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.image.cpu_manifest import CpuDetails, OpenFile
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.system import procfs
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS, describe
from phosd.errors import Busy, Internal


class TreeFiles:
    """The files of ``tree``, or of a ``clone`` of it. Inside the context a process of the owner's
    stands by.
    """

    def __init__(self, tree: SavedTree, policy: Policy, clone: Clone | None = None) -> None:
        self._tree = tree
        self._policy = policy
        self._clone = clone
        self._opened = contextlib.ExitStack()
        self._worker: Worker | None = None
        self._orders: Orders | None = None
        self._changes: tuple[Change, ...] = ()
        self._replaced: set[str] = set()
        """The files that the restore cuts or replaces."""
        self.told: tuple[str, ...] = ()
        """What is done with files that are not as they were, in words."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def look(self) -> None:
        """Begin to compare them with their records, while the caller goes on to something else."""
        if self._worker is None:
            self._orders = self._make_orders()
            self._worker = self._opened.enter_context(
                Worker(self._orders.uid, self._orders.inherited)
            )
            self._worker.order(self._orders)

    def require_as_saved(
        self, cancellation: Cancellation | None = None, *, replaced: bool = True
    ) -> None:
        """Raise :class:`Unsupported` for files that are not as they were saved, or whose locks
        others have, and :class:`Busy` if a process uses one that a restore will cut or replace, if
        any is to be ``replaced``.
        """
        self.look()
        assert self._worker is not None and self._orders is not None
        answer = self._worker.answer(cancellation=cancellation)
        if not replaced:
            file_worker.require_usable(answer, self._policy)
            return
        self.told = answer.told
        changed = self._replaced | set(answer.back)
        _require_unused([*(each for each in answer.inodes if each.path in changed), *answer.aside])
        if self._clone is not None:
            self._clone.require_unlocked(answer.inodes)
        file_worker.require_usable(answer, self._policy)

    def prepare(self) -> None:
        """Cut and replace what has changed. Raises :class:`Unsupported` if that is not possible."""
        orders = self._orders or self._make_orders()
        work = (orders.open_files, orders.memory_files, orders.written_files)
        if any(work) or orders.needed or orders.copies or orders.state is not None:
            left = orders.written_files if self._clone is None else ()
            wanted = msgspec.structs.replace(orders, apply=True, mended=left)
            ask = file_worker.work if self._worker is None else self._worker.ask
            try:
                answer = ask(wanted)
            except Internal:  # it has ended; one that takes too long may still be at it
                mend(self._tree, orders.mark)
                raise
            file_worker.require_usable(answer, self._policy)
            self._changes = answer.changes

    def settle(self) -> None:
        """Remove what was kept to undo that."""
        if self._changes:
            file_worker.work(msgspec.structs.replace(self._alone(), settle=self._changes))
        self._changes = ()

    def undo(self) -> None:
        """Put the files back as they were before :meth:`prepare`."""
        if self._changes:
            file_worker.work(msgspec.structs.replace(self._alone(), undo=self._changes))
        self._changes = ()

    def _alone(self) -> Orders:
        """Return orders for changes alone: another process carries them out, since a user may have
        ended the one that stood by.
        """
        user = self._tree.user
        return Orders(user.uid, user.gid, user.groups, mark="")

    def _make_orders(self) -> Orders:
        """Root opens the saved bytes, the worker the paths."""
        details, user = self._tree.details, self._tree.user
        copies = self._clone.copies if self._clone is not None else ()
        locks = self._clone.locks if self._clone is not None else ()
        cut = set[str]()
        if self._policy is not Policy.AS_IS:
            cut = {f.path for f in details.open_files if f.write_only and not f.appended}
        replaced = cut - {file.path for file in copies}
        self._replaced = replaced | {file.path for file in details.memory_files}
        sources = [self._open(file.saved) for file in details.memory_files]
        rolled = details.written_files if self._policy is Policy.ROLLBACK or copies else ()
        if self._clone is not None:  # what nobody had open is the original's
            rolled = tuple(file for file in rolled if not file.declared)
        written = [self._open(file.saved) for file in rolled]
        alone = self._policy is Policy.ROLLBACK and self._clone is None
        return Orders(
            uid=user.uid,
            gid=user.gid,
            groups=user.groups,
            mark=secrets.token_hex(4),
            policy=self._policy,
            open_files=checkable(details),
            memory_files=details.memory_files,
            mapped_files=details.mapped_files,
            sources=tuple(sources),
            written_files=rolled,
            written=tuple(written),
            identified=tuple(
                self._replaced | {file.path for file in rolled} | {lock.path for lock in locks}
            ),
            needed=socket_folders(self._tree.folder),
            copies=copies,
            outputs_made=() if self._refuses_gone else made_if_missing(details),
            state=details.declared if alone else None,
        )

    @property
    def _refuses_gone(self) -> bool:
        """Whether a log that is gone is a file that has changed. Another machine never had it."""
        apart = self._policy is Policy.KEEP or self._clone is not None
        return apart and not self._tree.details.imported

    def _open(self, saved: str) -> int:
        """Open a file of the tree's folder, for as long as the context lasts."""
        descriptor = os.open(self._tree.folder / saved, os.O_RDONLY | os.O_NOFOLLOW)
        self._opened.callback(os.close, descriptor)
        return descriptor


def mend(tree: SavedTree, mark: str = "") -> None:
    """Undo what a worker that was killed had half done with files of ``tree``, so that each is
    whole; and all that it had done with them, if its ``mark`` is known.
    """
    details, user = tree.details, tree.user
    if details.written_files or details.declared is not None:
        ids, files = (user.uid, user.gid, user.groups), details.written_files
        orders = Orders(*ids, mark=mark, mended=files, state=details.declared)
        file_worker.require_usable(file_worker.work(orders))


def checkable(details: CpuDetails) -> tuple[OpenFile, ...]:
    """Return the open files of which a restore needs that they are as they were."""
    # What the kernel tells of a process of the tree is there again when CRIU opens it.
    replaced = {file.path for file in details.memory_files}
    there = (file for file in details.open_files if not file.path.startswith("/proc/"))
    return tuple(file for file in there if file.path not in replaced)


def made_if_missing(details: CpuDetails) -> tuple[OpenFile, ...]:
    """Return the open files that a restore makes anew where they are missing: what the program only
    appends to.
    """
    return tuple({file.path: file for file in details.open_files if file.appended}.values())


def _require_unused(inodes: Sequence[Inode]) -> None:
    """Raise :class:`Busy` if a process uses a file that the restore will cut or replace."""
    wanted = {(inode.device, inode.number): inode.path for inode in inodes}
    if not wanted:
        return

    def used(pid: int) -> set[tuple[int, int]]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found = procfs.descriptors(pid, without=OSError)
            files = {(d.file.st_dev, d.file.st_ino) for d in found if d.writable}
            return files | {(m.device, m.inode) for m in procfs.mappings(pid) if m.shared}
        return set()

    for pid, files in ABANDONABLE_THREADS.each(procfs.pids(), used):
        for key in files & wanted.keys():
            raise Busy(
                f"{describe(pid)} uses {wanted[key]}, which belongs to the image",
                hint="end it and try again",
            )
