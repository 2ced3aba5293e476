"""The options that callers may give."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from phosd.errors import InvalidOption

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
    ``pid`` or restored it, those that began from ``since`` to ``until``, and those with a lower
    number than ``before``: with the last number of an answer, what follows it.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 50
    pid: Pid | None = None
    operation: Operation | None = None
    state: Literal["queued", "running", "done", "failed", "cancelled", "interrupted"] | None = None
    since: Time = 0
    until: Time = _END_OF_TIME
    before: Annotated[int, msgspec.Meta(ge=1, le=_END_OF_TIME)] = _END_OF_TIME


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
