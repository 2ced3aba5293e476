"""What the daemon asks of the engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from phosd.engine.hook_client.link import HookBlock, Kernel
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.experience import Experience
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.operations.admission import DiskLimits
from phosd.engine.program.process import GpuProcess
from phosd.engine.system.procfs import ProcessId
from phosd.errors import PhosError
from phosd.service.jobs.options import (
    CheckpointRequest,
    MigrateRequest,
    RestoreRequest,
    ResumeRequest,
    SuspendRequest,
)


class Engine(Protocol):
    """The operations on this node. Each blocks and may be called from any thread."""

    def settle(self, interrupted: Sequence[InterruptedJob]) -> dict[int, str]:
        """Once, before anything else: bring back what an earlier phosd left standing, and clear up;
        by job, what was done.
        """

    def checkpoint(
        self,
        pid: int,
        request: CheckpointRequest,
        caller: int,
        experience: Experience,
        progress: Progress,
    ) -> Manifest:
        """Save the process tree of ``pid`` for user id ``caller``.

        ``experience`` is what the history knows of earlier checkpoints of the program.
        """

    def restore(self, image: str, request: RestoreRequest, caller: int, progress: Progress) -> int:
        """Bring an image back to life for user id ``caller``; the pid that it runs under."""

    def migrate(
        self, pid: int, to: str, request: MigrateRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        """Move ``pid`` and what belongs to it to other GPUs for user id ``caller``; by the ordinal
        of each GPU that it left the one that it is on now. ``to`` is an ordinal, the beginning of a
        UUID, or ``old:new`` for each GPU, separated by commas.
        """

    def suspend(self, pid: int, request: SuspendRequest, caller: int, progress: Progress) -> str:
        """Take ``pid`` and what belongs to it off its GPUs; where its memory is now: ``memory`` or
        ``disk``.
        """

    def resume(
        self, pid: int, request: ResumeRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        """Bring a suspended process back; which GPU it had, and has now, as :meth:`migrate`."""

    def swap(
        self, leaving: int, coming: int, request: SuspendRequest, caller: int, progress: Progress
    ) -> None:
        """Suspend one process and resume another in its place, or leave both as they were."""

    def divided(self, gpu: int) -> str:
        """Why no process can be moved to a GPU: it "is in MIG mode", say; or nothing."""

    def context_bytes(self) -> int:
        """Device memory that the driver needs for a process besides what the process has."""

    def recover(self, pid: int) -> str:
        """Bring a process back that was left locked, checkpointed or parked, and what belongs to
        it; what was found and done. Raises ``Busy`` while a job works on one of them.
        """

    def verify(self, image: str, progress: Progress) -> None:
        """Read every byte of an image again. Raises ``ImageCorrupt``."""

    def images(self) -> list[Manifest]:
        """All published images, oldest first."""

    def damaged(self) -> Mapping[str, PhosError]:
        """The images that are left out of :meth:`images`, and why each cannot be read."""

    def image(self, image: str) -> Manifest:
        """One image. Raises ``NoSuchImage``."""

    def delete_image(self, image: str) -> None:
        """Remove an image for good. Raises ``NoSuchImage``."""

    def processes(self) -> list[GpuProcess]:
        """The GPU processes of this node."""

    def blocks(self, process: ProcessId) -> list[tuple[HookBlock, int]]:
        """The blocks of a process, (pid, start time), in order of id, each with the ordinal of its
        GPU (-1: host memory). Like the next two, this asks the hook; ``inspection.py`` has
        what it raises.
        """

    def kernels(self, process: ProcessId) -> list[Kernel]:
        """The kernels of a process that were launched since a checkpoint last looked at them."""

    def hook_log(self, process: ProcessId) -> str:
        """The counters of a process's hook, and the newest lines of its log."""

    def gpus(self) -> list[GpuInfo]:
        """The GPUs of this node."""

    def compact(self, go_on: Callable[[], bool]) -> int:
        """Give back the bytes of images that nobody needs any more; how many. ``go_on`` is asked
        now and then.
        """

    def remove_outputs(self, users: Iterable[int], before: float) -> int:
        """Remove folders of these users that ``phos run`` made, that nobody needs, and that were
        not written to since ``before`` (seconds since the epoch); how many.
        """

    def limit(self, limits: DiskLimits) -> None:
        """Hold later checkpoints to these limits."""

    def close(self) -> None:
        """Let go of everything."""
