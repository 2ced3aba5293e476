"""Dump the trees of a group with CRIU: into memory during the stop, into the image afterwards."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phosd.engine.criu.dump.dump import Dump, DumpOptions, TreeDump
from phosd.engine.criu.images import rseq_areas
from phosd.engine.criu.run.memory_handles import MemoryHandle
from phosd.engine.criu.run.page_store import PageStore
from phosd.engine.criu.run.program import Criu
from phosd.engine.criu.run.tracers import checkpoint_turn, restore_turn
from phosd.engine.image import private_files
from phosd.engine.image.cpu_manifest import WRITTEN
from phosd.engine.image.manifest import Tree
from phosd.engine.image.writer import ImageWriter
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.rollback import Undo, Undoing
from phosd.engine.program.tree import ProcessTree
from phosd.errors import Internal, Timeout


@dataclass(frozen=True)
class DriverWork:
    """What the driver does with the processes of a group while all threads are held but their
    ``restore_threads``, which are by process. ``bring_back`` is called whatever came before.
    """

    restore_threads: Callable[[], Mapping[int, int]]
    checkpoint: Callable[[], None]
    bring_back: Callable[[], None]


class CpuSide(Protocol):
    """What has the processes of a group dumped: CRIU as phosd runs it, or as a runtime does."""

    @property
    def trees(self) -> list[ProcessTree]:
        """The trees as they were when frozen."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Paths of files that the program writes to, and that are too large, or too many, to be
        saved.
        """

    @property
    def inheritors(self) -> frozenset[int]:
        """Processes that had the GPU driver's devices when frozen, restored as inert."""

    def prepare(self, trees: list[ProcessTree]) -> None:
        """Do what can be done while the program runs."""

    def dump(self, cancellation: Cancellation, handles: Sequence[MemoryHandle] = ()) -> None:
        """Freeze and dump each tree, and let it go. They may have ``handles`` open."""

    def dump_around(self, driver: DriverWork, cancellation: Cancellation) -> None:
        """Do that while the driver checkpoints the processes, and brings them back."""


class CpuParts(Undoing):
    """The CRIU dumps of a group, one per tree.

    ``staging`` is a folder in memory, in which the trees' memory may take ``pages`` bytes; without
    it, or if they are not free, CRIU writes directly to the disk. :meth:`prepare` may be called
    while the program runs, :meth:`dump` when it is stopped.
    """

    def __init__(
        self,
        program: Criu,
        writer: ImageWriter,
        staging: Path | None,
        options: DumpOptions,
        pages: int = 0,
    ) -> None:
        self._program = program
        self._writer = writer
        self._base = staging or writer.folder
        self._options = options
        self._page_bytes = pages if staging is not None else 0
        self._pages: list[PageStore | None] = []
        self._prepared: list[Dump] = []
        self._dumps: list[TreeDump] = []
        self._undo = Undo()

    def prepare(self, trees: list[ProcessTree]) -> None:
        """Allocate memory for the pages of each tree, and start CRIU, which waits."""
        self._pages = self._allocated(len(trees))
        for index, (tree, pages) in enumerate(zip(trees, self._pages, strict=True)):
            folder = self._base / f"criu-{index}"
            folder.mkdir(mode=0o700)
            dump = Dump(self._program, tree, folder, self._options, pages)
            self._prepared.append(self._undo.enter(dump))

    def _allocated(self, count: int) -> list[PageStore | None]:
        """Return a page store for each tree. Without room for all, everything goes to the disk."""
        nowhere: list[PageStore | None] = [None] * count
        if not self._page_bytes:
            return nowhere
        with ExitStack() as stores:
            found: list[PageStore | None] = []
            for _ in range(count):
                store = PageStore.if_there_is_room(self._base, self._page_bytes // count)
                if store is None:
                    self._base = self._writer.folder
                    return nowhere
                found.append(stores.enter_context(store))
            self._undo.add(stores.pop_all().close)
            return found

    def dump(self, cancellation: Cancellation, handles: Sequence[MemoryHandle] = ()) -> None:
        """Freeze and dump each tree, and let it go. They may have ``handles`` open."""
        for prepared in self._prepared:
            self._dumps.append(prepared.finish(cancellation, handles))

    def dump_around(self, driver: DriverWork, cancellation: Cancellation) -> None:
        """Freeze all trees, have the driver checkpoint their processes, dump them, have the driver
        bring them back, and let them go. The trees' threads are held all the time.

        If anything fails, all dumps are given up, and the driver brings the processes back still.
        """
        tracers = [each.tracer for each in self._prepared if each.tracer is not None]
        until = time.monotonic() + self._options.deadline
        with ThreadPoolExecutor(max_workers=len(self._prepared)) as pool:
            dumps = [pool.submit(each.finish, cancellation) for each in self._prepared]

            def leave_ended() -> None:
                """Expect nothing more of the CRIU of a tree whose dump has ended."""
                for prepared, dump in zip(self._prepared, dumps, strict=True):
                    if dump.done() and prepared.tracer is not None:
                        prepared.tracer.leave()

            def check() -> None:
                leave_ended()
                cancellation.check()
                if time.monotonic() > until:
                    raise Timeout(
                        f"the program was not frozen within {self._options.deadline:g} s",
                        hint="the program goes on; try again when the machine is less busy",
                    )

            def refuse() -> None:
                for prepared in self._prepared:
                    prepared.refuse()

            threads = driver.restore_threads
            with Undo() as undo:
                undo.add(restore_turn, tracers, threads, driver.bring_back, leave_ended, refuse)
                well = checkpoint_turn(tracers, threads, driver.checkpoint, check, until)
        for dump in dumps:
            self._dumps.append(dump.result())
        if not well:
            raise Internal("CRIU held the program, and did not say so", hint="report this")

    @property
    def trees(self) -> list[ProcessTree]:
        """The trees as they were when frozen."""
        return [dump.tree for dump in self._dumps]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Paths of files that the program writes to, and that are too large, or too many, to be
        saved.
        """
        return tuple(path for dump in self._dumps for path in dump.left_out)

    @property
    def inheritors(self) -> frozenset[int]:
        """Processes that had the GPU driver's devices when frozen, restored as inert."""
        return frozenset().union(*(dump.inheritors for dump in self._dumps))

    def persist(self) -> tuple[Tree, ...]:
        """Write everything to the disk. Returns the manifest's entries."""
        records = []
        for prepared in self._prepared:
            prepared.settle()
        for dump, pages in zip(self._dumps, self._pages, strict=True):
            name = dump.folder.name
            if self._base != self._writer.folder:
                with private_files.space_errors(f"the files of image {self._writer.id}"):
                    _copy_tree(dump.folder, self._writer.folder / name)
                    if pages is not None:
                        pages.complete(dump.folder, self._writer.folder / name)
                shutil.rmtree(dump.folder)
            rseq_areas.clear(self._writer.folder / name)
            digests = self._writer.seal(name, once=WRITTEN)
            records.append(dump.record(name, digests))
        return tuple(records)


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a tree like :func:`shutil.copytree`, but raise the first error unchanged and at once."""
    target.mkdir(mode=0o700)
    for entry in source.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            _copy_tree(entry, target / entry.name)
        else:
            shutil.copyfile(entry, target / entry.name, follow_symlinks=False)
