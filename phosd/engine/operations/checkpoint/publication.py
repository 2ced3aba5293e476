"""Write what is left of an image, and publish it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from phosd import __version__
from phosd.engine.criu.dump.dumps import CpuParts
from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import Block, Gpu, Manifest
from phosd.engine.image.name import next_number
from phosd.engine.image.writer import ImageWriter
from phosd.engine.job.progress import Progress
from phosd.engine.node.machine import describe_gpus, this_host
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint.choose_mode import Choice
from phosd.engine.operations.checkpoint.options import CheckpointOptions
from phosd.engine.operations.manifest_records import saved_records
from phosd.engine.operations.restorable import require_restorable
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.name import name_of
from phosd.engine.program.within import within_of
from phosd.errors import PhosError


@dataclass
class Publication:
    """The publication of the image that ``writer`` and ``cpu`` have."""

    node: Node
    group: CheckpointGroup
    choice: Choice
    in_use: Mapping[int, int]
    """The bytes on each GPU that the group used when the attempt began."""
    parent: Manifest | None
    writer: ImageWriter
    cpu: CpuParts
    progress: Progress
    options: CheckpointOptions
    manifest: Manifest | None = field(default=None, init=False)
    """The image, once it is published."""

    def __post_init__(self) -> None:
        self._name = self.options.name or name_of(self.group.trees[0].root.pid)
        self._within = within_of(self.group.trees[0].root.pid)
        self._number = 0
        if self._name:  # nobody else saves it meanwhile
            images = self.node.store.list()
            self._number = next_number(self._name, self.writer.owner, images)

    def publish(self, blocks: tuple[Block, ...]) -> Manifest:
        """Publish the image with these blocks."""
        group, progress, choice = self.group, self.progress, self.choice
        stopped = self.options.stands
        progress.phase("persist", stopped=stopped)
        point(Point.CHECKPOINT_PERSIST)
        trees = self.cpu.persist()
        progress.phase("publish", stopped=stopped)
        point(Point.CHECKPOINT_PUBLISH)
        manifest = Manifest(
            id=self.writer.id,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            mode=choice.mode,
            why=choice.why,
            owner=self.writer.owner,
            host=this_host(self.node.criu, self.node.config.runtime_dir),
            gpus=self._gpus(blocks),
            trees=trees,
            processes=saved_records(self.cpu.trees, group, parked=choice.mode != "driver"),
            blocks=blocks,
            stop_seconds=progress.stop_seconds,
            wrong_guesses=progress.wrong_guesses,
            parent=self.parent.id if self.parent is not None else None,
            name=self._name,
            number=self._number,
            phosd=__version__,
            within=self._within,
            ended=self.options.then == "end",
        )
        require_restorable(self.node, manifest, self.writer.folder)
        self.writer.publish(manifest)
        self.manifest = manifest
        progress.finish()
        return manifest

    def _gpus(self, blocks: tuple[Block, ...]) -> tuple[Gpu, ...]:
        seen = {gpu for member in self.group.members for gpu in member.gpus}
        used = {*self.in_use, *(block.gpu for block in blocks)}
        return describe_gpus(seen, used, self.in_use if self.choice.mode == "driver" else {})


def make_durable(node: Node, image_id: str, progress: Progress, *, stopped: bool = False) -> None:
    """Write an image that is in memory to the disk, too."""
    try:
        node.store.write_back.write(image_id, progress, stopped=stopped)
    except PhosError:
        progress.note(f"image {image_id} was made, but is not on the disk yet")
        raise
