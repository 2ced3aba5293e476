"""Save the state that all modes save alike: the driver's, CRIU's, and the records of blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from phosd.engine.criu.dump.dumps import CpuSide, DriverWork
from phosd.engine.criu.dump.inherited_devices import InheritedDevices
from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import Block, ChunkRef
from phosd.engine.image.writer import ImageWriter
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import ExportedBlock
from phosd.engine.memory.reservation import Reservation
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint.options import CheckpointOptions
from phosd.engine.operations.checkpoint.standing import Standing
from phosd.engine.operations.manifest_records import block_records, memory_handles
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.locked import locked
from phosd.engine.program.process import is_gpu_process
from phosd.engine.program.tree import scan
from phosd.errors import Busy
from phosd.units import counted

_TOLD = 5
"""Files that are told, at most, of those that are left out."""


class EndedUnasked(Busy):
    """A process came or ended, and the driver could not be asked whether it used a GPU. Another
    attempt may succeed.
    """

    code = Busy.__name__


@dataclass(frozen=True)
class Attempt:
    """One attempt to make an image of ``group``. After a wrong guess the job begins another."""

    node: Node
    group: CheckpointGroup
    writer: ImageWriter
    cpu: CpuSide
    options: CheckpointOptions
    progress: Progress
    keepers: tuple[Mover, ...]
    """Movers of the GPUs that the group used when the attempt began."""
    standing: Standing
    complete: Callable[[tuple[Block, ...]], None]
    """Completes the image, with these blocks, of a program that stands still until then, and does
    what is to be done with it.
    """

    def save_processes(
        self,
        movers: Sequence[Mover] = (),
        *,
        shared: Sequence[ExportedBlock] = (),
        beside: Callable[[], object] = lambda: None,
        blocks: Callable[[], tuple[Block, ...]] = tuple,
    ) -> None:
        """Run the driver's checkpoint and CRIU's dump. The keepers, and ``movers``, which have
        blocks of the group, reserve the freed memory. Programs may have descriptors of the
        ``shared`` blocks open.

        ``beside`` is called once the driver is done with the GPUs, while CRIU works. ``blocks``
        are those of the image of a program that stands still until it is complete.
        """
        inherited = self._inherited()
        self.progress.phase("control", stopped=True)
        point(Point.CHECKPOINT_CONTROL)
        keepers = (*self.keepers, *movers)
        reservation = Reservation(
            self.node.gpu_locks,
            keepers,
            self.group.process_ids,
            self.progress,
            self.options.deadline,
        )
        with (
            self._no_newcomers(),
            driver_checkpoint.checkpointed(self.group.gpu_pids, reservation),
        ):
            self.progress.phase("cpu", stopped=True)
            point(Point.CHECKPOINT_CPU)
            beside()
            with self.standing.until_complete():
                self.cpu.dump(self.progress, memory_handles(self.group.trees, shared))
                self._tell_left_out()
                self._complete_standing(inherited, blocks)
            self.progress.phase("unpark", stopped=True)
            point(Point.CHECKPOINT_UNPARK)

    def save_held_processes(self) -> None:
        """Run the driver's checkpoint inside CRIU's dump, which holds all threads meanwhile: there
        may be no hook that keeps them out of the driver (hazard 38).
        """
        self.progress.phase("control", stopped=True)
        point(Point.CHECKPOINT_CONTROL)
        group, progress = self.group, self.progress
        reservation = Reservation(self.node.gpu_locks, self.keepers, group.process_ids, progress)

        def checkpoint() -> None:
            processes.checkpoint()
            progress.phase("cpu", stopped=True)
            point(Point.CHECKPOINT_CPU)

        def bring_back() -> None:
            with Undo() as undo:
                undo.add(processes.bring_back)
                progress.phase("unpark", stopped=True)
                point(Point.CHECKPOINT_UNPARK)

        inherited = self._inherited()
        with (
            self._no_newcomers(),
            locked(group.gpu_pids, reservation) as processes,
            self.standing.until_complete(),
        ):
            threads = processes.restore_threads
            self.cpu.dump_around(DriverWork(lambda: threads, checkpoint, bring_back), progress)
            self._tell_left_out()
            self._complete_standing(inherited, tuple)

    def blocks(
        self, blocks: Sequence[ExportedBlock], chunks: Mapping[int, tuple[ChunkRef, ...]]
    ) -> tuple[Block, ...]:
        """Return the manifest's records of these blocks; ``chunks`` is by key."""
        return block_records(self.cpu.trees, blocks, chunks)

    def _tell_left_out(self) -> None:
        """Note which files a restore will not put back."""
        left = self.cpu.left_out
        for path in left[:_TOLD]:
            self.progress.note(f"{path} is not saved with the image: it is too large")
        if len(left) > _TOLD:
            self.progress.note(f"nor is what {counted(len(left) - _TOLD, 'other file')} had")

    def _inherited(self) -> InheritedDevices | None:
        """Look at the devices of a running program that will not answer when it stands still.
        Processes that its user had stopped look like the ones that are stopped for the image then.
        """
        if not self.options.stands:
            return None
        trees = [scan(tree.root.pid) for tree in self.group.trees]
        for process in (process for tree in trees for process in tree.living):
            self.node.stopped.require_going(process.pid)
        return InheritedDevices.of(trees, self.group.gpu_pids)

    def _complete_standing(
        self, inherited: InheritedDevices | None, blocks: Callable[[], tuple[Block, ...]]
    ) -> None:
        """Complete the image of a program that stands still until then."""
        if inherited is None:
            return
        for tree in self.cpu.trees:
            if doubtful := inherited.doubtful(tree, self.group.gpu_pids):
                raise EndedUnasked(
                    f"process {doubtful[0]} was started, or opened devices of the GPU driver, "
                    "during the checkpoint, and may use the GPU",
                    hint="try again when the program has started all its processes",
                )
        self.complete(blocks())

    @contextmanager
    def _no_newcomers(self) -> Iterator[None]:
        """Do :meth:`_require_no_newcomers` when the program runs again: frozen, or in a group stop,
        no process answers the driver. If it stood still until its image was complete, there were
        none.
        """
        try:
            yield
        except EndedUnasked:  # the driver may know by now
            self._require_no_newcomers()
            raise
        if not self.options.stands:
            self._require_no_newcomers()

    def _require_no_newcomers(self) -> None:
        """Raise :class:`Busy` if a process has begun to use a GPU, and was not saved so, and
        :class:`EndedUnasked` if one may have.

        A process that has ended can no longer be asked whether it had only inherited the driver's
        devices.
        """
        users = {member.pid for member in self.group.users}
        others = [
            found for tree in self.cpu.trees for found in tree.living if found.pid not in users
        ]
        for found in others:
            if is_gpu_process(found.pid):
                raise Busy(
                    f"process {found.pid} began to use the GPU during the checkpoint",
                    hint="try again when the program has started all its processes",
                )
        for found in others:
            if found.pid in self.cpu.inheritors and not found.alive:
                raise EndedUnasked(
                    f"process {found.pid} ended during the checkpoint, and may have begun to use "
                    "the GPU before",
                    hint="try again when the program does not start and end processes all the time",
                )
