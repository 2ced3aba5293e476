"""Restore a tree as a clone: beside the program that it is a copy of, and beside other clones.

In a pid namespace of its own a clone has its pids, and CRIU makes its memory, pipes and pairs of
sockets anew. What is left has names that are the same for all. Files on the disk that the program
writes to are copied as they were at the checkpoint, to names of the clone's own; it listens on
other TCP ports where another program has its own; what else only one program can have
(:mod:`phosd.engine.criu.kinds`) must be free. So nothing of a clone's
reaches the original through what it had when it was saved.

The names are changed in a private copy of CRIU's ``files.img``. The sockets of the GPU's driver get
other names there, too.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial

from phosd.engine.criu.files.file_worker import Copied, Inode
from phosd.engine.criu.files.sqlite import is_database
from phosd.engine.criu.images.saved_files import SavedFiles
from phosd.engine.criu.kinds import registry
from phosd.engine.criu.kinds.internet_sockets import listening_ports, listening_ports_taken
from phosd.engine.criu.kinds.kind import CloneNames
from phosd.engine.criu.kinds.locks import Lock, locked, locks_of
from phosd.engine.criu.restore.private_copy import private_copy
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.image.cpu_manifest import OpenFile
from phosd.engine.system.free_ports import ports_for
from phosd.errors import Reason, Unsupported

_SHOWN = 5


class CloneFiles(StrEnum):
    """What becomes of files on the disk that the program had open to write to: the clone writes to
    a copy, or to the same file if it only appends, or there is no clone.
    """

    COPY = "copy"
    SHARE = "share"
    REFUSE = "refuse"


class ClonePorts(StrEnum):
    """On which TCP ports a clone listens: on others where another program has the program's own, or
    always on others; or there is no clone where another program has them.
    """

    MOVE = "move"
    ALWAYS = "always"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Clone:
    """The clone called ``name`` of ``tree``, which may be one of several."""

    tree: SavedTree
    name: str
    files: CloneFiles
    ports: ClonePorts = ClonePorts.MOVE
    moved: dict[int, int] = field(default_factory=dict, compare=False)
    """The TCP ports on which it listens, by those that it had, once that is known."""

    @cached_property
    def _saved(self) -> SavedFiles:
        return SavedFiles(self.tree.folder)

    @cached_property
    def written(self) -> tuple[OpenFile, ...]:
        """The files that the program writes to, one for each path; memory with a name is none."""
        in_memory = {file.path for file in self.tree.details.memory_files}
        found: dict[str, OpenFile] = {}
        for file in self.tree.details.open_files:
            reads = file.flags & os.O_ACCMODE == os.O_RDONLY
            if reads or file.path in in_memory or file.path.startswith("/proc/"):
                continue
            if file.path not in found or not file.appended:
                found[file.path] = file
        return tuple(found.values())

    @property
    def copies(self) -> tuple[Copied, ...]:
        """The files that are copied."""
        if self.files is not CloneFiles.COPY:
            return ()
        return tuple(
            Copied(file.path, f"{file.path}.clone-{self.name}", file.size) for file in self.written
        )

    @cached_property
    def locks(self) -> tuple[Lock, ...]:
        """The file locks that it needs. A file that is copied is the clone's alone."""
        copied = {file.path for file in self.copies}
        return tuple(lock for lock in locks_of(self._saved) if lock.path not in copied)

    @cached_property
    def movable_ports(self) -> frozenset[int]:
        """The TCP ports instead of which it may listen on others: none by which it calls itself."""
        if self.ports is ClonePorts.REFUSE:
            return frozenset()
        ends = (end for each in self.tree.details.connections for end in each.ends)
        own = {int(end.address[1]) for end in ends}
        return listening_ports(self._saved) - own

    def require_possible(self) -> None:
        """Raise :class:`Unsupported`, naming what the clone cannot have beside others."""
        shared = self.files is CloneFiles.SHARE
        together = [file.path for file in self.written if not (shared and file.appended)]
        if self.files is not CloneFiles.COPY and together:
            raise Unsupported(
                f"a clone would write to the original's files: {_listed(together)}",
                hint="`--clone-files copy` gives it copies"
                + ("; only files that are appended to can be shared" if shared else ""),
                reason=Reason.TAKEN,
            )
        databases = [*self._databases()]
        if databases:
            raise Unsupported(
                f"a clone would use the original's journal, which SQLite finds by the name of its "
                f"database: {_listed(databases)}",
                hint="end the original, and restore it; or save the program when it has closed its "
                "database",
                reason=Reason.TAKEN,
            )
        if taken := [*registry.taken(self._saved, self.tree.details, self.movable_ports)]:
            raise _taken(taken)

    def _ports_of_others(self) -> frozenset[int]:
        """Return the ports that it cannot or is not to have."""
        if self.ports is ClonePorts.ALWAYS:
            return self.movable_ports
        return listening_ports_taken(self._saved)

    def _databases(self) -> Iterator[str]:
        """Yield the databases of SQLite that the program writes to."""
        for file in self.tree.details.written_files:
            saved = os.open(self.tree.folder / file.saved, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if is_database(saved) and not file.declared:
                    yield file.path
            finally:
                os.close(saved)

    def require_unlocked(self, inodes: Iterable[Inode]) -> None:
        """Raise :class:`Unsupported` if others have a lock that it needs. CRIU would wait."""
        if held := [*locked(self.locks, inodes)]:
            raise _taken(held)

    @contextmanager
    def private_copy(self) -> Iterator[SavedTree]:
        """Yield the tree with CRIU's files as the clone needs them."""
        paths = {os.fsencode(file.path): os.fsencode(file.target) for file in self.copies}
        with ports_for(self.movable_ports, self._ports_of_others) as ports:
            self.moved.update((port, new) for port, new in ports.items() if new != port)
            change = partial(registry.in_clone, names=CloneNames(paths, self.moved))
            with private_copy(self.tree, change) as copy:
                yield copy


def _taken(what: list[str]) -> Unsupported:
    return Unsupported(
        f"a clone cannot have what another program has now: {_listed(what)}",
        hint="end that program first, if it is the original or another clone",
        reason=Reason.TAKEN,
    )


def _listed(what: list[str]) -> str:
    more = f"; and {len(what) - _SHOWN} more" if len(what) > _SHOWN else ""
    return "; ".join(what[:_SHOWN]) + more
