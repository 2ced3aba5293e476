"""Typed errors: each names what happened, the object it happened to, and the next step.

The class name is the last part of the D-Bus error name (``org.phos.Error.<class name>``).
"""

import enum
import re

from phosd.units import counted


class Reason(enum.StrEnum):
    """What stands in the way, for programs: a code that keeps its meaning, while messages may
    change. The first ones are the hook's (``phosd/hook/reasons.def``).
    """

    MANAGED_MEMORY = "managed-memory"
    """The program uses managed memory (``cuMemAllocManaged``, ``__managed__``, a pool of it)."""
    MULTICAST = "multicast"
    """The program uses multicast memory."""
    LEGACY_IPC = "legacy-ipc"
    """The program shares memory or events by legacy CUDA IPC where the hook cannot."""
    SHARED_POOL = "shared-pool"
    """The program has a memory pool that other processes can import, and the hook cannot back."""
    EXTERNAL_MEMORY = "external-memory"
    """The program shares memory or semaphores with another driver."""
    SPARSE_ARRAY = "sparse-array"
    """The program maps memory into sparse arrays."""
    FOREIGN_HANDLE = "foreign-handle"
    """The program shares memory by a handle that is no file descriptor."""
    NO_DESCRIPTOR = "no-descriptor"
    """The program has no file descriptor left that the hook needs."""
    PRIVATE_CALLS = "private-calls"
    """A library is loaded that calls the driver past the hook: NVENC, NVDEC, OptiX."""
    CUDA_TOOL = "cuda-tool"
    """A debugger, profiler or checker of CUDA is in the process, or has been."""
    GREEN_CONTEXT = "green-context"
    """The program uses green contexts."""
    UNKNOWN_FUNCTION = "unknown-function"
    """The program may call a function of the driver that the hook does not know."""
    NO_MEMBARRIER = "no-membarrier"
    """The kernel, or a seccomp filter, refuses membarrier(2)."""
    OLD_DRIVER = "old-driver"
    """The driver lacks a function that parking needs."""

    NO_HOOK = "no-hook"
    """The program was not started with ``phos run``."""
    HOOK_SILENT = "hook-silent"
    """The hook in the process does not answer."""
    NOT_PARKABLE = "not-parkable"
    """The hook refuses to park the memory, for a reason without a code of its own."""
    TOO_MANY_BLOCKS = "too-many-blocks"
    """The process has more blocks of device memory than phosd reads."""
    SHARED_MEMORY = "shared-memory"
    """Processes share device memory, and this would take it from some of them."""
    HOST_MEMORY = "host-memory"
    """The program has VMM memory in host RAM."""
    BUSY_GPU = "busy-gpu"
    """Others compute on the GPU, beside whom the program would be ended."""
    DIVIDED_GPU = "divided-gpu"
    """The GPU is divided (MIG), so the driver moves no program there."""
    MISSING_DEVICE = "missing-device"
    """The process is in a container that was not given the GPU."""
    UNSEEN_GPU = "unseen-gpu"
    """The program is on a GPU that it did not see when it was started, which rules a mode out."""
    UNKNOWN_GPU = "unknown-gpu"
    """The process uses a GPU that phosd does not see."""
    NO_GPU = "no-gpu"
    """There is no GPU, or no driver that works."""
    NO_FIGURES = "no-figures"
    """The GPU reports no figures."""
    DRIVER_STATE = "driver-state"
    """The driver holds the process in another state, or another tool has it."""
    UNSAFE_DRIVER = "unsafe-driver"
    """The checkpoint of this release of the driver is known to end programs."""
    DRIVER_REFUSES = "driver-refuses"
    """The driver says that it cannot save the process."""

    PROCESS_STATE = "process-state"
    """The process tree has something that CRIU cannot save; the message names each."""
    CLOSED_PROCESS = "closed-process"
    """The kernel lets nobody look at the process."""
    CLOSED_MOUNT = "closed-mount"
    """A file is on a file system that only its user may look at (FUSE)."""
    LANDLOCK = "landlock"
    """The process is under Landlock rules."""
    CGROUP = "cgroup"
    """The cgroups of the processes differ, or cannot be given back."""
    TCP_CONNECTION = "tcp-connection"
    """A TCP connection cannot be saved, or not be made again here."""
    UNREAD_DATA = "unread-data"
    """Data or descriptors are on their way through a socket; later they may not be."""
    TOO_LARGE = "too-large"
    """The program has too many files, mappings or processes for an image."""
    OTHER_CRIU = "other-criu"
    """The image was made by a CRIU that this one cannot read."""
    OTHER_FORMAT = "other-format"
    """An image from elsewhere, or the file of a suspended program, is in a format that this phosd
    does not read.
    """
    OTHER_CPU = "other-cpu"
    """The image needs features that this CPU lacks."""
    OTHER_RUNTIME_DIR = "other-runtime-dir"
    """The image's hooks are reached in another runtime folder than this phosd's."""
    CHANGED_FILES = "changed-files"
    """The program's files are not as they were at the checkpoint."""

    TAKEN = "taken"
    """A clone would need what only one program can have, and another one has."""

    NO_DOOR = "no-door"
    """Nobody could call the program: it listens on no socket."""

    UNKNOWN_USER = "unknown-user"
    """The user database does not know the user."""
    OUTPUT_FOLDER = "output-folder"
    """The folder of outputs cannot be looked at."""
    CONTAINER = "container"
    """The container that phosd is in was not given what it needs, or the host has another phosd."""
    JOB_ENDED = "job-ended"
    """The job has ended already."""
    ANALYSIS_OFF = "analysis-off"
    """Kernels are not analysed on this machine."""
    MISSING_PACKAGE = "missing-package"
    """A Python package is not installed."""


class PhosError(Exception):
    """Base class of every error that an operation reports to its caller: ``what`` happened, to
    what; ``hint``, what to do next; ``reason``, a code for programs (:class:`Reason`, or one of a
    newer phosd), empty where there is none.
    """

    details: tuple[str, ...] = ()
    """What a program that phosd ran has said, line by line: for the notes of a job, since it is too
    much for a message.
    """

    def __init__(self, what: str, hint: str = "", *, reason: str = "") -> None:
        super().__init__(f"{what}; {hint}" if hint else what)
        self.what = what
        self.hint = hint
        self.reason = str(reason)

    def __str__(self) -> str:
        """Return the message with the notes: further errors that occurred while steps were
        undone.
        """
        return "; ".join([super().__str__(), *getattr(self, "__notes__", ())])

    @property
    def code(self) -> str:
        """Name of the error on D-Bus, in the history and in ``--json`` output."""
        return type(self).__name__


class NoSuchProcess(PhosError):
    """The pid does not exist, is a zombie, or is not a GPU process."""


class NotAuthorized(PhosError):
    """The caller may not touch this process or image."""


class Busy(PhosError):
    """Another job holds the process, or the program could not be brought to a halt in time."""


class Unsupported(PhosError):
    """The process uses something that cannot be saved; the message names it, and ``reason`` is its
    code.
    """


class DriverTooOld(PhosError):
    """The driver has no checkpoint API, or is older than the one that made the image."""


class GpuMismatch(PhosError):
    """The image needs another GPU model."""


class OutOfMemory(PhosError):
    """Device or host memory does not suffice."""


class OutOfSpace(PhosError):
    """The disk (or the staging tmpfs) does not suffice."""


class ImageCorrupt(PhosError):
    """An image's bytes are not what was written; the message names the chunk or the file."""


class NoSuchImage(PhosError):
    """No published image has this id."""


class NoSuchJob(PhosError):
    """phosd knows no job of this number."""


class InvalidOption(PhosError):
    """An option is unknown, or its value is not of its type or range."""


class MisSpeculation(PhosError):
    """The program wrote memory that phosd had not predicted, and the caller allowed no fallback."""


def changed_in_the_stop(count: int, gpu: int | None = None) -> MisSpeculation:
    """Return the error for ``count`` chunks (of one GPU) that changed while the gate was closed."""
    where = "" if gpu is None else f" on GPU {gpu}"
    return MisSpeculation(
        f"{counted(count, 'chunk')}{where} changed while the gate was closed",
        hint="something outside the program writes its memory (a peer, a NIC)",
    )


class Timeout(PhosError):
    """A process or service did not answer within its deadline."""


class CallbackFailed(PhosError):
    """What a program does before it is saved has failed; the message has its words."""


class Cancelled(PhosError):
    """The caller cancelled the job."""


class NoBus(PhosError):
    """No bus answers where phosd should be."""


class RemoteFailed(PhosError):
    """A place to which images are pushed, or pulled from, does not do what it is asked to."""


class NoDaemon(PhosError):
    """phosd does not run on the bus, did not start, or ended meanwhile."""


class OtherError(PhosError):
    """An error without a class here: one of D-Bus itself, or of a newer phosd. ``name`` is the last
    part of its name.
    """

    def __init__(self, name: str, what: str, hint: str = "", *, reason: str = "") -> None:
        super().__init__(what, hint, reason=reason)
        self.name = name

    @property
    def code(self) -> str:
        """Name of the error on D-Bus."""
        return self.name


class Internal(PhosError):
    """A broken assumption of phosd itself, or a tool it relies on is missing or failing."""


_REASON = re.compile(r"(.*) \[([a-z-]+)\]", re.DOTALL)


def in_one_text(error: PhosError) -> str:
    """Return the message with the reason behind it, for D-Bus: who uses GDBus sees no message where
    an error reply has more than one text.
    """
    return f"{error} [{error.reason}]" if error.reason else str(error)


def from_one_text(name: str, text: str) -> tuple[str, str]:
    """Return the message and the reason of the error ``name``. Each ``Unsupported`` has a reason; a
    message of another may end in brackets by chance, or because somebody named a file so.
    """
    found = _REASON.fullmatch(text) if name == Unsupported.__name__ else None
    return (found[1], found[2]) if found else (text, "")


def named(name: str, what: str, hint: str = "", *, reason: str = "") -> PhosError:
    """Return the error whose class has this name."""
    for kind in PhosError.__subclasses__():
        if kind.__name__ == name and kind is not OtherError:
            return kind(what, hint, reason=reason)
    return OtherError(name, what, hint, reason=reason)
