"""Check whether an image can be restored, before anything on the node is touched."""

from collections.abc import Callable, Iterator
from functools import partial

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.checks import Check
from phosd.engine.node.image_placement import ImagePlacement
from phosd.engine.node.machine import same_machine
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import require_device_memory
from phosd.engine.operations.move_checks import require_alone
from phosd.engine.operations.restore.cpu_side import CpuSide
from phosd.engine.operations.restore.image_gpus import blocks_need
from phosd.engine.operations.restore.left_hollow import require_may_be_hollow


class Admission:
    """The checks before a restore; one of them has the GPUs chosen."""

    def __init__(
        self,
        node: Node,
        manifest: Manifest,
        cpu: CpuSide,
        choose: Callable[[], ImagePlacement],
        *,
        hollow: bool = False,
    ) -> None:
        self._node = node
        self._manifest = manifest
        self._cpu = cpu
        self._choose = choose
        self._hollow = hollow
        self._placement: ImagePlacement | None = None

    @property
    def placement(self) -> ImagePlacement:
        """The GPUs, once the checks have passed."""
        assert self._placement is not None
        return self._placement

    def checks(self) -> Iterator[Check]:
        """Yield the checks: one is run before the next is made. Those of files go on beside them.
        What depends on the GPUs is not checked if none could be chosen.
        """
        manifest = self._manifest
        yield from same_machine(manifest, self._node.criu, self._node.config.runtime_dir)
        if self._hollow:
            yield "hollow", partial(require_may_be_hollow, manifest)
        yield from self._cpu.admission()
        yield "GPUs", self._place  # the program has ended, whose memory fills them otherwise
        if self._placement is None:
            return
        needs = blocks_need(manifest, self._placement.moves, hollow=self._hollow)
        yield "device memory", partial(require_device_memory, self._node, needs)
        if manifest.shares_memory and not self._hollow:
            # Beside a clone, its original is another program.
            own = {*self._cpu.pids_here, *self._node.suspended.hollow()}
            yield "other programs", partial(require_alone, needs.keys(), own)

    def _place(self) -> str:
        self._placement = self._choose()
        return self._placement.text
