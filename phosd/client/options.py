"""Options of the calls, by their names on D-Bus. What is left out is phosd's default."""

from typing import Literal, TypedDict

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
    "export",
    "import",
]


class JobOptions(TypedDict, total=False):
    """Options of every call that starts a job. A call that is repeated with the same ``token``
    returns the same job.
    """

    token: str


class QueueOptions(JobOptions, total=False):
    """``queue``: wait if another job works on the process, instead of failing with ``Busy``."""

    queue: bool


class StopOptions(QueueOptions, total=False):
    """``callback_deadline``: the seconds within which a program with safe points must come to one;
    ``without_callbacks``: it is stopped anywhere then, instead of the job's failing.
    """

    callback_deadline: float
    without_callbacks: bool


class CheckpointOptions(StopOptions, total=False):
    """``deadline``: the seconds that the program may take to come to rest; ``every``: the seconds
    after which the checkpoint is repeated, of which the last ``keep`` images stay; ``rehearse``:
    the restore of each is rehearsed. What the others
    mean is said in docs/reference/dbus.md.
    """

    mode: Literal["auto", "concurrent", "recopy", "stop", "driver"]
    fallback: Literal["auto", "none"]
    parent: str
    tcp: Literal["refuse", "close"]
    deadline: float
    release_cached: bool
    durable: bool
    then: Literal["run", "end", "hold"]
    in_memory: bool
    every: float
    keep: int
    rehearse: bool


class RestoreOptions(JobOptions, total=False):
    """``files``: what becomes of output written since the checkpoint; ``output``: a file for the
    standard output and error; ``end``: a file that tells how the program has ended;
    ``pid_namespace``: the program gets one of its own, also if it was in none; ``clone``: the name
    of a clone that is restored beside the program; ``clone_files``: what becomes of the files on
    the disk that the program writes to; ``gpu``: a destination, if not where it was;
    ``cgroups_of``: a process in whose cgroups the program goes on, if not where it was.
    """

    files: Literal["keep", "cut"]
    output: str
    end: str
    pid_namespace: bool
    clone: str
    clone_files: Literal["copy", "share", "refuse"]
    gpu: str
    cgroups_of: int


class VerifyOptions(JobOptions, total=False):
    """``rehearse``: the restore is rehearsed, up to the program's first instruction, and ``files``
    is as of a restore.
    """

    rehearse: bool
    files: Literal["keep", "cut"]


class MigrateOptions(StopOptions, total=False):
    """``deadline``: the seconds that the program may take to come to rest."""

    mode: Literal["auto", "precopy", "driver"]
    deadline: float


class SuspendOptions(StopOptions, total=False):
    """``where``: where the device memory goes; ``deadline``: the seconds that the program may take
    to come to rest; ``thaw``: a step of Slurm's that is frozen meanwhile is thawed.
    """

    where: Literal["auto", "memory", "disk"]
    deadline: float
    thaw: bool


class ResumeOptions(QueueOptions, total=False):
    """``gpu``: a destination, if not where it was."""

    gpu: str


class HistoryOptions(TypedDict, total=False):
    """Which jobs: of process ``pid``, of a kind, in a state; ``since`` and ``until`` when they
    began, in seconds since the epoch.
    """

    pid: int
    operation: Operation
    state: Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
    since: float
    until: float


class EventOptions(TypedDict, total=False):
    """Which events: at most ``limit``, of at least a ``severity``, ``since`` when, in seconds since
    the epoch.
    """

    limit: int
    severity: Literal["info", "warning", "error"]
    since: float
