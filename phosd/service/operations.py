"""What the daemon asks of the engine, and the options that callers may give."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from phosd.engine.concern import Unfinished
from phosd.engine.errors import InvalidOption, PhosError
from phosd.engine.experience import Experience
from phosd.engine.gpus import GpuInfo
from phosd.engine.hooklink import Block, Kernel
from phosd.engine.image.manifest import Manifest
from phosd.engine.mover.parked import Process
from phosd.engine.process import GpuProcess
from phosd.engine.progress import Progress
from phosd.engine.space import DiskLimits

Token = Annotated[str, msgspec.Meta(max_length=128)]
Pid = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=31 * 86_400)]
Deadline = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""Seconds that a program may take to come to rest."""
_END_OF_TIME = (1 << 63) - 1
Time = Annotated[int, msgspec.Meta(ge=0, le=_END_OF_TIME)]
"""Microseconds since the epoch."""
Operation = Literal[
    "checkpoint",
    "restore",
    "verify",
    "delete",
    "recover",
    "migrate",
    "suspend",
    "resume",
    "swap",
]
Keep = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Engine(Protocol):
    """The operations on this node. Each blocks and may be called from any thread."""

    def settle(self, unfinished: Sequence[Unfinished]) -> dict[int, str]:
        """Once, before anything else: bring back what an earlier phosd left standing, and clear up;
        by job, what was done.
        """

    def checkpoint(
        self,
        pid: int,
        request: "CheckpointRequest",
        caller: int,
        experience: Experience,
        progress: Progress,
    ) -> Manifest:
        """Save the process tree of ``pid`` for user id ``caller``.

        ``experience`` is what the history knows of earlier checkpoints of the program.
        """

    def restore(
        self, image: str, request: "RestoreRequest", caller: int, progress: Progress
    ) -> int:
        """Bring an image back to life for user id ``caller``; the pid that it runs under."""

    def migrate(
        self, pid: int, to: str, request: "MigrateRequest", caller: int, progress: Progress
    ) -> dict[int, int]:
        """Move ``pid`` and what belongs to it to other GPUs for user id ``caller``; by the ordinal
        of each GPU that it left the one that it is on now. ``to`` is an ordinal, the beginning of a
        UUID, or ``old:new`` for each GPU, separated by commas.
        """

    def suspend(self, pid: int, request: "SuspendRequest", caller: int, progress: Progress) -> str:
        """Take ``pid`` and what belongs to it off its GPUs; where its memory is now: ``memory`` or
        ``disk``.
        """

    def resume(
        self, pid: int, request: "ResumeRequest", caller: int, progress: Progress
    ) -> dict[int, int]:
        """Bring a suspended process back; which GPU it had, and has now, as :meth:`migrate`."""

    def swap(
        self, leaving: int, coming: int, request: "SuspendRequest", caller: int, progress: Progress
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

    def blocks(self, process: Process) -> list[tuple[Block, int]]:
        """The blocks of a process, (pid, start time), in order of id, each with the ordinal of its
        GPU (-1: host memory). Like the next two, this asks the hook; ``engine/inspection.py`` has
        what it raises.
        """

    def kernels(self, process: Process) -> list[Kernel]:
        """The kernels of a process that were launched since a checkpoint last looked at them."""

    def hook_log(self, process: Process) -> str:
        """The counters of a process's hook, and the newest lines of its log."""

    def gpus(self) -> list[GpuInfo]:
        """The GPUs of this node."""

    def compact(self, go_on: Callable[[], bool]) -> int:
        """Give back the bytes of images that nobody needs any more; how many. ``go_on`` is asked
        now and then.
        """

    def limit(self, limits: DiskLimits) -> None:
        """Hold later checkpoints to these limits."""

    def close(self) -> None:
        """Let go of everything."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``a{sv}`` of a call that takes no options."""


class JobOptions(Options, frozen=True):
    """Options of every call that starts a job."""

    token: Token = ""


class CheckpointRequest(JobOptions, frozen=True, omit_defaults=True):
    """Options of a checkpoint. ``tcp`` says what becomes of connected TCP sockets.

    A wrong guess makes the job go on in a mode that guesses less, or fail with ``fallback=none``.
    ``parent`` is an image whose chunks are not saved again, or ``auto``. ``deadline`` is how many
    seconds the program may take to come to rest. With ``queue`` the job waits for another that
    works on the process. With ``release_cached`` PyTorch is asked first to give back the device
    memory that it keeps and does not use. ``every`` (seconds) repeats the checkpoint until the
    process ends, and keeps the last ``keep`` images so made; 0 ends that.
    """

    mode: Literal["auto", "concurrent", "recopy", "stop", "driver"] = "auto"
    tcp: Literal["refuse", "close"] = "refuse"
    fallback: Literal["auto", "none"] = "auto"
    parent: Annotated[str, msgspec.Meta(max_length=128)] = ""
    deadline: Deadline | None = None
    queue: bool = False
    release_cached: bool = False
    every: Seconds | None = None
    keep: Keep | None = None


class RestoreRequest(JobOptions, frozen=True):
    """Options of a restore.

    ``files`` says what becomes of files that grew since the checkpoint; ``output`` is a file for
    what the program prints, when its standard output was a pipe or a terminal.
    """

    files: Literal["keep", "cut"] = "keep"
    output: str = ""


class MoveRequest(JobOptions, frozen=True):
    """Options of taking a process off a GPU; ``deadline`` and ``queue`` as for a checkpoint."""

    deadline: Deadline | None = None
    queue: bool = False


class MigrateRequest(MoveRequest, frozen=True):
    """Options of a migration. With ``precopy`` memory is copied while the program runs; ``driver``
    needs no hook and stops it for long; ``auto`` chooses.
    """

    mode: Literal["auto", "precopy", "driver"] = "auto"


class SuspendRequest(MoveRequest, frozen=True):
    """Options of a suspension, and of a swap. ``where`` the device memory goes; ``auto``: to host
    memory, as long as there is enough.
    """

    where: Literal["auto", "memory", "disk"] = "auto"


class ResumeRequest(JobOptions, frozen=True):
    """Options of resuming a process. ``gpu`` is where it goes, as for a migration; none: where it
    was. With ``queue`` the job waits for another that works on the process.
    """

    gpu: str = ""
    queue: bool = False


class BlockOptions(Options, frozen=True):
    """Options of a process's ``ListBlocks``: how many at most, of the lowest ids."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=20_000)] = 5_000


class ImageBlockOptions(BlockOptions, frozen=True):
    """Options of an image's ``ListBlocks``: how many at most, after the first ``offset``."""

    offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0


class KernelOptions(Options, frozen=True):
    """Options of ``ListKernels``: how many at most, suspects first."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=4_000)] = 500


class TrustOptions(Options, frozen=True):
    """Options of ``TrustKernels``: those of this name only; empty: all."""

    kernel: str = ""


class SampleOptions(Options, frozen=True):
    """Options of ``ListSamples``: the figures of ``since`` or later."""

    since: Time = 0


class HistoryOptions(Options, frozen=True):
    """Options of ``ListHistory``: how many jobs, and of which: those that worked on process
    ``pid`` or restored it, and those that began from ``since`` to ``until``.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 50
    pid: Pid | None = None
    operation: Operation | None = None
    state: Literal["queued", "running", "done", "failed", "cancelled", "interrupted"] | None = None
    since: Time = 0
    until: Time = _END_OF_TIME


class EventOptions(Options, frozen=True):
    """Options of ``ListEvents``: how many, of at least this severity, that happened at ``since`` or
    later.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 200
    severity: Literal["info", "warning", "error"] = "info"
    since: Time = 0


_T = TypeVar("_T", bound=Options)


def parse_options(values: dict[str, Any], kind: type[_T]) -> _T:
    """The options of a call, checked. Raises :class:`InvalidOption` naming what is wrong."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        names = ", ".join(kind.__struct_fields__) or "none"
        text = str(error).replace("Object contains unknown field", "there is no option")
        raise InvalidOption(text, hint=f"the options of this call are: {names}") from None
