"""The objects of phosd, as records: one field for each property on D-Bus.

Times are seconds since the epoch (None: unknown), durations seconds, sizes bytes; on D-Bus times
are microseconds since the epoch (0: unknown). What a phosd of another version does not tell is
empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from phosd.interface.model import prop


@dataclass(frozen=True)
class Manager:
    """phosd itself."""

    path: str
    version: str = prop("Version", "s", "The version of phosd.", constant=True)
    features: frozenset[str] = prop(
        "Features", "as", "What this version can do.", constant=True, empty=frozenset()
    )
    gpus: tuple[str, ...] = prop("GPUs", "ao", "The objects of the GPUs.")
    troubles: tuple[str, ...] = prop(
        "Troubles",
        "as",
        "What is wrong without stopping jobs: a history that cannot be written, images that cannot "
        "be read, a configuration that was refused. For administrators.",
        private=True,
    )


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node. What it does not report is None, and -1 on D-Bus."""

    path: str
    ordinal: int = prop("Ordinal", "u", "Its number for CUDA.")
    uuid: str = prop("UUID", "s", "Its UUID.", constant=True)
    name: str = prop("Name", "s", "What it is.", constant=True)
    memory_total: int = prop("MemoryTotal", "t", "Bytes of memory.")
    memory_used: int = prop("MemoryUsed", "t", "Bytes of memory in use.")
    utilisation: float | None = prop("Utilisation", "d", "0..1; -1: not known.", empty=None)
    temperature: float | None = prop(
        "Temperature", "d", "Degrees Celsius; -1: not known.", empty=None
    )
    power: float | None = prop("Power", "d", "Watts; -1: not known.", empty=None)
    pids: tuple[int, ...] = prop("Processes", "au", "The pids that use it.")
    movers: tuple[int, ...] = prop(
        "Movers", "au", "Those of them that are data movers of phosd itself.", empty=()
    )


@dataclass(frozen=True)
class Process:
    """A process that uses a GPU."""

    path: str
    pid: int = prop("Pid", "u", "Its pid.", constant=True)
    start_time: int = prop(
        "StartTime",
        "t",
        "When it began, in clock ticks since the boot; with the pid it names the process.",
        constant=True,
    )
    user: int = prop("User", "u", "The user id that it runs as.", constant=True)
    user_name: str = ""
    command: tuple[str, ...] = prop("CommandLine", "as", "Its arguments.", private=True)
    gpus: tuple[str, ...] = prop("GPUs", "ao", "The objects of the GPUs that it uses.")
    device_bytes: int = prop("DeviceBytes", "t", "Bytes of device memory that it has.")
    hook: str = prop(
        "HookState", "s", "`hooked`, `driver` (no hook: only the mode `driver`) or `unsupported`."
    )
    reason: str = prop(
        "Reason",
        "s",
        "Why it is not hooked, or not supported; or where its memory is while it is suspended.",
        private=True,
    )
    state: str = prop(
        "State",
        "s",
        "`running`, `suspended`, `stopped` by a signal or a debugger, or another state that the "
        "driver or the hook reports.",
    )
    last_image: str = prop(
        "LastImage",
        "s",
        "The id of its latest image; if there is none yet, of the one that it was restored from.",
        private=True,
    )
    output: tuple[str, ...] = prop(
        "Output", "as", "The files to which its standard output and error go.", private=True
    )
    name: str = prop(
        "Name", "s", "The name that `phos run --name` gave its program; empty: none.", private=True
    )
    container: Mapping[str, str] = prop(
        "Container",
        "a{ss}",
        "The container that it is in: `runtime`, `id`, and `name` and `pod` where they are known; "
        "empty: in none.",
        private=True,
        empty={},
    )
    slurm_step: str = prop(
        "SlurmStep",
        "s",
        "The step of a Slurm job that it is in, as `4711.0` or `4711.batch`; empty: in none.",
        private=True,
    )
    restarter: str = prop(
        "Restarter",
        "s",
        "What would start its program again if it, or the node, failed: `unit bert.service`, `user "
        "unit bert.service`, `pod ann/bert-0`, `Slurm job 4711`; empty: nothing that phosd knows.",
        private=True,
    )
    pool: str = prop("Pool", "s", "The pool that its program is of; empty: of none.", private=True)
    waits: bool = prop(
        "Waits", "b", "Whether it waits in its pool to be started: it has computed nothing yet."
    )
    hollow: bool = prop(
        "Hollow", "b", "Whether it is suspended with its contexts on its GPUs, and frozen."
    )
    ready: bool = prop("Ready", "b", "Whether it is hollow, and its memory is on its GPUs already.")
    wakes: bool = prop(
        "Wakes", "b", "Whether it is resumed when somebody calls it, should it be suspended."
    )
    idle: float = prop(
        "Idle",
        "d",
        "Seconds without work after which it is suspended until somebody calls it; 0: it is not.",
    )
    every: float = prop(
        "CheckpointInterval", "d", "Seconds between periodic checkpoints; 0: there are none."
    )
    keep: int = prop("CheckpointsKept", "u", "How many images of periodic checkpoints are kept.")


@dataclass(frozen=True)
class Image:
    """A saved process."""

    path: str
    id: str = prop("Id", "s", "Its id; ids sort by time.", constant=True)
    created: float | None = prop("Created", "t", "When it was made.", constant=True, empty=None)
    owner: int = prop(
        "Owner",
        "u",
        "The user id that the program ran as, and a restored one runs as.",
        constant=True,
    )
    owner_name: str = ""
    pid: int = prop(
        "Pid", "u", "The pid that the program's first process had.", private=True, constant=True
    )
    command: tuple[str, ...] = prop(
        "CommandLine", "as", "The arguments of that process.", private=True, constant=True
    )
    gpus: tuple[tuple[str, str], ...] = prop(
        "GPUs", "a(ss)", "UUID and chip of each GPU that it was on.", constant=True
    )
    total_bytes: int = prop("TotalBytes", "t", "Bytes that a restore brings back.", constant=True)
    device_bytes: int = prop(
        "DeviceBytes", "t", "Bytes of device memory among them.", constant=True
    )
    stored_bytes: int = prop(
        "StoredBytes",
        "t",
        "Bytes that it takes on disk: equal chunks are stored once.",
        constant=True,
    )
    shared_bytes: int = prop("SharedBytes", "t", "Bytes of those that an older image holds, too.")
    state: str = prop(
        "State",
        "s",
        "`in memory`: it is lost if the machine ends now; `durable`: it is on the disk.",
        empty="durable",  # an older phosd has no other
    )
    mode: str = prop("Mode", "s", "The mode that it was made in.", constant=True)
    why: str = prop("Why", "s", "Why it was made in that mode.", private=True, constant=True)
    wrong_guesses: int = prop(
        "WrongGuesses",
        "u",
        "How often the program wrote where phosd did not expect it.",
        constant=True,
    )
    parent: str = prop(
        "Parent",
        "s",
        "The image whose chunks were not saved again; empty: none.",
        private=True,
        constant=True,
    )
    stop_seconds: float = prop(
        "StopSeconds", "d", "For how many seconds the program stood still.", constant=True
    )
    verified: float | None = prop(
        "Verified", "t", "When it was verified last; 0: never.", empty=None
    )
    whole: bool | None = prop("VerifiedWhole", "b", "Whether it was whole then.", empty=None)
    output: tuple[str, ...] = prop(
        "Output",
        "as",
        "The files to which that process's standard output and error went, and go again.",
        private=True,
        constant=True,
    )
    name: str = prop(
        "Name", "s", "The name of the program; empty: it has none.", private=True, constant=True
    )
    number: int = prop(
        "Number",
        "u",
        "Its number among the owner's images with this name: `NAME@NUMBER`.",
        constant=True,
    )
    within: str = prop(
        "Within",
        "s",
        "The pod, Slurm job or container that the program was in; empty: in none.",
        private=True,
        constant=True,
    )
    note: str = prop("Note", "s", "What its owner has written of it; empty: nothing.", private=True)
    rehearsed: float | None = prop(
        "Rehearsed", "t", "When its restore was rehearsed last; 0: never.", empty=None
    )
    rehearsal_error: str = prop(
        "RehearsalError", "s", "Why that failed; empty: it did not.", private=True
    )
    crashes: int = prop(
        "Crashes",
        "u",
        "How often in a row its program has crashed within a minute of its restore from it; "
        "`phos run --resume` leaves the image for the one before it after three.",
        private=True,
    )


@dataclass(frozen=True)
class Pool:
    """Programs of an image that are there before somebody asks for them."""

    path: str
    name: str = prop("Name", "s", "Its name.", constant=True)
    owner: int = prop("Owner", "u", "The user id that its programs run as.", constant=True)
    owner_name: str = ""
    image: str = prop("Image", "s", "The image that they are made of.", constant=True)
    hollow: int = prop("Hollow", "u", "How many are to wait hollow.")
    ready: int = prop("Ready", "u", "How many more are to wait ready.")
    max: int = prop("Max", "u", "How many there may be, with those that run.")
    waiting: int = prop("Waiting", "u", "How many wait, those that are ready among them.")
    waiting_ready: int = prop("WaitingReady", "u", "How many of these are ready.")
    running: int = prop("Running", "u", "How many were started, and live.")
    trouble: str = prop(
        "Trouble", "s", "Why it could not be filled; empty: it could.", private=True
    )
    stated: bool = prop(
        "Stated", "b", "Whether `phosd.toml` says what it is: then nobody else changes it."
    )


@dataclass(frozen=True)
class Phase:
    """One phase of a job; ``stopped``: the program was stopped in it."""

    name: str
    stopped: bool
    seconds: float
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True)
class Job:
    """A piece of long work. Its texts may name files, so they are private to its owner."""

    path: str
    number: int = prop(
        "Number", "u", "Its number, which no other job of this node ever has.", constant=True
    )
    operation: str = prop(
        "Operation",
        "s",
        "`checkpoint`, `restore`, `verify`, `delete`, `recover`, `migrate`, `suspend`, `resume`, "
        "`swap`, `export` or `import`.",
        constant=True,
    )
    target: str = prop(
        "Target",
        "s",
        "The pid, or the id of the image, that it is about; of a swap both pids, the leaving one "
        "first.",
        private=True,
        constant=True,
    )
    name: str = prop(
        "Name", "s", "The name of the program; empty: it has none.", private=True, constant=True
    )
    within: str = prop(
        "Within",
        "s",
        "The pod, Slurm job or container that the program is in; empty: in none.",
        private=True,
        constant=True,
    )
    owner: int = prop("Owner", "u", "The user id that asked for it.", constant=True)
    owner_name: str = ""
    state: str = prop("State", "s", "`queued`, `running`, `done`, `failed` or `cancelled`.")
    position: int = prop(
        "Position", "u", "Its place among the jobs that wait, from 1; 0 when it does not wait."
    )
    phase: str = prop("Phase", "s", "What it does now, by the names of the protocol.")
    stopped: bool = prop("ProgramStopped", "b", "Whether the program stands still now.")
    progress: float | None = prop(
        "Progress", "d", "How much of the phase is done, 0..1.", empty=None
    )
    bytes_done: int = prop("BytesDone", "t", "Bytes of the phase that are done.")
    bytes_total: int = prop("BytesTotal", "t", "Bytes of the phase in all; 0: not known.")
    rate: float = prop("Rate", "d", "Bytes a second of the phase.")
    started: float | None = prop(
        "Started", "t", "When it began, or was asked for while it waits.", empty=None
    )
    ended: float | None = prop("Ended", "t", "When it ended; 0: it has not.", empty=None)
    expected_end: float | None = prop(
        "ExpectedEnd", "t", "When the phase should end; 0: not known.", empty=None
    )
    stop_seconds: float = prop(
        "StopSeconds", "d", "For how many seconds the program has stood still."
    )
    mode: str = prop(
        "Mode",
        "s",
        "The mode of a checkpoint or a migration, or where the memory of a suspended process goes: "
        "as it was asked for; once done, what was used.",
    )
    destination: str = prop(
        "Destination",
        "s",
        "Where a process is to go, as the caller said it; empty: nowhere else.",
        constant=True,
    )
    why: str = prop("Why", "s", "Why that mode was used.", private=True)
    wrong_guesses: int = prop(
        "WrongGuesses", "u", "How often the program wrote where phosd did not expect it."
    )
    suspects: tuple[str, ...] = prop(
        "Suspects", "as", "The kernels one of which caused a wrong guess, up to 100.", private=True
    )
    drained_bytes: int = prop(
        "DrainedBytes", "t", "Bytes of device memory saved so far, of all attempts."
    )
    drain_rate: float = prop("DrainRate", "d", "Bytes of device memory saved a second.")
    scheduled: bool = prop("Scheduled", "b", "Whether it is a periodic checkpoint.", constant=True)
    details: tuple[tuple[str, float], ...] = prop(
        "Details",
        "a{sd}",
        "Figures of the mode that was used, with units in their names: how large the snapshot was, "
        "or how many chunks were shadowed and how long the program waited; passes; "
        "`released_bytes` of `release_cached`.",
        private=True,
    )
    notes: tuple[str, ...] = prop("Notes", "as", "What a reader should know.", private=True)
    phases: tuple[Phase, ...] = prop(
        "Phases",
        "a(sbdtt)",
        "Each phase: name, whether the program stood still, seconds, bytes done, bytes in all.",
    )
    cancelable: bool = prop("Cancelable", "b", "Whether `Cancel` can still do something.")
    result: str = prop(
        "Result",
        "s",
        "What it made: an image id, or the pid of a process that was restored or swapped in; what "
        "it recovered; which GPU became which (`0:1,1:0`); or where memory was put.",
        private=True,
    )
    error: str = prop("Error", "s", "The last part of the name of the error that ended it.")
    message: str = prop("Message", "s", "What that error says.", private=True)
    error_reason: str = prop("ErrorReason", "s", "A code for what stood in the way; empty: none.")
    hint: str = prop("Hint", "s", "What to do next; `Message` says it, too.", private=True)

    @property
    def targets(self) -> list[str]:
        """The pids that the job works on, or the image."""
        return self.target.split()

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self.state not in ("queued", "running")


Record = Manager | Gpu | Process | Image | Pool | Job
