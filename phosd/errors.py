"""Typed errors: each names what happened, the object it happened to, and the next step.

The class name is the last part of the D-Bus error name (``org.phos.Error.<class name>``).
"""


class PhosError(Exception):
    """Base class of every error that an operation reports to its caller."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}; {hint}" if hint else what)
        self.what = what
        self.hint = hint

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
    """The process uses something that cannot be saved; the message names it."""


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


class InvalidOption(PhosError):
    """An option is unknown, or its value is not of its type or range."""


class MisSpeculation(PhosError):
    """The program wrote memory that phosd had not predicted, and the caller allowed no fallback."""


def changed_in_the_stop(count: int, gpu: int | None = None) -> MisSpeculation:
    """Return the error for ``count`` chunks (of one GPU) that changed while the gate was closed."""
    where = "" if gpu is None else f" on GPU {gpu}"
    return MisSpeculation(
        f"{count} chunks{where} changed while the gate was closed",
        hint="something outside the program writes its memory (a peer, a NIC)",
    )


class Timeout(PhosError):
    """A process or service did not answer within its deadline."""


class Cancelled(PhosError):
    """The caller cancelled the job."""


class Internal(PhosError):
    """A broken assumption of phosd itself, or a tool it relies on is missing or failing."""
