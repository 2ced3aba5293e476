"""One attempt at an image, and what all modes do alike: the driver's part, CRIU's, the blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phosd.engine import driver
from phosd.engine.checkpoint.options import CheckpointOptions
from phosd.engine.cpuparts import CpuParts
from phosd.engine.errors import Busy
from phosd.engine.faults import Point, point
from phosd.engine.from_unit import block_records
from phosd.engine.held import Held
from phosd.engine.image.manifest import Block, ChunkRef
from phosd.engine.image.writer import ImageWriter
from phosd.engine.mover import Mover
from phosd.engine.node import Node
from phosd.engine.process import is_gpu_process
from phosd.engine.progress import Progress
from phosd.engine.room import Room
from phosd.engine.unit import Unit


@dataclass(frozen=True)
class Attempt:
    """One image being made of ``unit``; a wrong guess ends it, and the job may begin another."""

    node: Node
    unit: Unit
    writer: ImageWriter
    cpu: CpuParts
    options: CheckpointOptions
    progress: Progress

    def save_processes(
        self,
        movers: Sequence[Mover],
        *,
        runs: bool = False,
        beside: Callable[[], object] = lambda: None,
    ) -> None:
        """The driver's part and CRIU's, and back; ``movers`` keep the room on their GPUs. ``runs``:
        nobody but the driver holds the program, which may wait for its turn. ``beside`` is called
        when the driver is done with the GPUs for the time that CRIU takes.
        """
        self.progress.phase("control", stopped=True)
        point(Point.CHECKPOINT_CONTROL)
        limit = None if runs else self.options.deadline
        room = Room(self.node.turns, movers, self.unit.identity, self.progress, limit)
        with driver.checkpointed(self.unit.gpu_pids, room):
            self.progress.phase("cpu", stopped=True)
            point(Point.CHECKPOINT_CPU)
            beside()
            self.cpu.dump(self.progress)
            self.progress.phase("unpark", stopped=True)
            point(Point.CHECKPOINT_UNPARK)
        self._require_no_newcomers()

    def blocks(
        self, blocks: Sequence[Held], chunks: Mapping[int, tuple[ChunkRef, ...]]
    ) -> tuple[Block, ...]:
        """The manifest's blocks, ``chunks`` by key."""
        return block_records(self.cpu.trees, blocks, chunks)

    def _require_no_newcomers(self) -> None:
        """A process that began to use the GPU after the others were stopped was saved without
        it.
        """
        for found in (p for tree in self.cpu.trees for p in tree.living):
            if found.pid not in self.unit.gpu_pids and is_gpu_process(found.pid):
                raise Busy(
                    f"process {found.pid} began to use the GPU during the checkpoint",
                    hint="try again when the program has started all its processes",
                )
