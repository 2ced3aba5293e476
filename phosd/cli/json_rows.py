"""What ``phos --json`` prints: a type for each kind of line.

docs/reference/json.md says what each key means, below the headings of :data:`ROWS`. From both
``packaging/make_schemas.py`` makes the JSON schema; tests hold all of them against what is printed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

Time = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
"""A time in UTC, to the second."""


class GpuName(TypedDict):
    """A GPU, in the line of a process."""

    ordinal: int
    uuid: str


class ImageGpu(TypedDict):
    """A GPU that an image was on."""

    uuid: str
    chip: str


class LiveBlock(TypedDict):
    """Device memory of a process. ``gpu`` is -1 for memory of the host."""

    id: int
    address: int
    size: int
    gpu: int
    flags: list[str]


class LiveKernel(TypedDict):
    """A kernel that the last checkpoint saw."""

    name: str
    module: str
    launches: int
    suspect: bool


class ImageBlock(TypedDict):
    """Device memory in an image. ``gpu`` is -1 for memory of the host."""

    pid: int
    id: int
    address: int
    size: int
    gpu: int
    chunks: int
    stored_bytes: int
    shared_bytes: int


class LeftFile(TypedDict):
    """What a restore has left beside a file."""

    path: str
    bytes: int
    time: Time


class ImageFile(TypedDict):
    """A file of the program in an image."""

    path: str
    bytes: int
    left: list[LeftFile]


class JobPhase(TypedDict):
    """A phase of a job."""

    name: str
    stopped: bool
    seconds: float
    bytes_done: int
    bytes_total: int


class PastPhase(TypedDict):
    """A phase of a job in the history. ``begin`` is in microseconds since the epoch."""

    name: str
    begin: int
    seconds: float
    bytes: int
    stopped: bool


class ErrorRow(TypedDict):
    """What a command that fails prints last, and for each thing that failed."""

    error: str
    reason: str | None
    message: str


class ProcessRow(TypedDict):
    """A line of `phos ps`: a process."""

    pid: int
    start_time: int
    user: int
    user_name: str
    gpus: list[GpuName]
    device_bytes: int
    hook: str
    state: str
    last_image: str
    checkpoint_interval: float | None
    checkpoints_kept: int | None
    command: list[str]
    reason: str
    output: list[str]
    name: str | None
    container: dict[str, str] | None
    slurm_step: str | None
    restarter: str | None
    pool: str | None
    waits: bool
    hollow: bool
    ready: bool
    wakes: bool
    idle: float | None


class ProcessDetails(ProcessRow):
    """The line of `phos ps PID`."""

    doors: list[str]
    blocks: list[LiveBlock]
    all_blocks: bool
    kernels: list[LiveKernel]
    all_kernels: bool


class LaunchedKernelRow(TypedDict):
    """A line of `phos ps PID --kernels` and `phos analyse PID`: a kernel."""

    kernel: str
    module: str
    launches: int
    suspect: bool
    in_hook: bool
    idempotent_launches: int
    overwriting_launches: int
    undecided_launches: int
    state: str
    reason: str
    parameter_bytes: int | None
    roles: dict[str, str] | None
    unknown_reads: list[str] | None
    unknown_writes: list[str] | None
    ranges_read: bool | None
    ranges_written: bool | None
    idempotent: str | None
    idempotent_why: list[str] | None


class LogRow(TypedDict):
    """The line of `phos ps PID --log`."""

    pid: int
    log: str


class ProgramRow(TypedDict):
    """A line of `phos status`: a program."""

    name: str | None
    pool: str | None
    user_name: str
    pids: list[int]
    gpus: list[int]
    device_bytes: int
    state: str
    levels: list[str]
    protection: str
    image: str | None
    image_created: Time | None
    age: float | None
    checkpoint_interval: float | None
    next_in: float | None
    stop_seconds: float | None
    trouble: str | None
    trouble_job: int | None
    restarter: str | None


class GpuRow(TypedDict):
    """A line of `phos gpus`: a GPU."""

    ordinal: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    utilisation: float | None
    temperature: float | None
    power: float | None
    processes: list[int]
    movers: list[int]
    other_processes: list[int]


class PoolRow(TypedDict):
    """A line of `phos pool`: a pool."""

    name: str
    owner: int
    image: str
    hollow: int
    ready: int
    max: int
    waiting: int
    waiting_ready: int
    running: int
    trouble: str | None
    stated: bool


class CheckRow(TypedDict):
    """A line of `--dry-run`: a check."""

    check: str
    trouble: str | None
    reason: str | None
    text: str


class JobRow(TypedDict):
    """A line of a command that runs a job: its present state."""

    job: int
    operation: str
    target: str
    name: str | None
    within: str | None
    state: str
    position: int | None
    phase: str
    progress: float | None
    bytes_done: int
    bytes_total: int
    rate: float
    stop_seconds: float
    mode: str
    destination: str
    why: str
    wrong_guesses: int
    suspects: list[str]
    drained_bytes: int
    drain_rate: float
    scheduled: bool
    details: dict[str, float]
    notes: list[str]
    phases: list[JobPhase]
    result: str


class ListedJobRow(JobRow):
    """A line of `phos jobs`: a job."""

    owner: int
    started: Time
    ended: Time | None
    error: str | None
    reason: str | None
    message: str


class CancelledRow(TypedDict):
    """The line of `phos jobs --cancel`."""

    job: int
    cancelling: bool


class ScheduleEndRow(TypedDict):
    """The line of `phos checkpoint --every off`."""

    pid: int
    checkpoint_interval: float | None


class ContinuedRow(TypedDict):
    """The line of `phos continue`."""

    pid: int
    held: bool


class ImageRow(TypedDict):
    """A line of `phos images`: an image."""

    id: str
    created: Time
    owner: int
    owner_name: str
    pid: int
    total_bytes: int
    device_bytes: int
    stored_bytes: int
    shared_bytes: int
    mode: str
    state: str
    crashes: int
    why: str
    wrong_guesses: int
    parent: str | None
    gpus: list[ImageGpu]
    stop_seconds: float
    verified: Time | None
    whole: bool | None
    rehearsed: Time | None
    rehearsal_error: str | None
    command: list[str]
    output: list[str]
    name: str | None
    number: int | None
    within: str | None
    note: str | None


class ImageDetails(ImageRow):
    """The line of `phos images IMAGE`."""

    blocks: list[ImageBlock]
    files: list[ImageFile]


class NoteRow(TypedDict):
    """The line of `phos note`."""

    image: str
    note: str | None


class SentRow(TypedDict):
    """The last line of a command that sends an image or receives one."""

    image: str
    chunks: int
    bytes: int
    sent_chunks: int
    sent_bytes: int


class RemoteImageRow(TypedDict):
    """A line of `phos pull --list`: an image there."""

    image: str
    name: str | None
    bytes: int
    signed: bool


class DeletedRow(TypedDict):
    """A line of `phos rm`: an image that was deleted."""

    image: str
    deleted: bool


class ThingRow(TypedDict):
    """A line of `phos prune`: what is, or would be, deleted."""

    kind: str
    name: str
    bytes: int
    time: Time
    why: str


class PrunedRow(TypedDict):
    """A line of `phos prune`: what was deleted."""

    kind: str
    name: str
    deleted: bool


class PastJobRow(TypedDict):
    """A line of `phos history`: a job. What is not known is left out."""

    id: int
    operation: NotRequired[str]
    target: NotRequired[str]
    name: NotRequired[str]
    within: NotRequired[str]
    owner: NotRequired[int]
    state: NotRequired[str]
    started: NotRequired[float]
    ended: NotRequired[float]
    mode: NotRequired[str]
    why: NotRequired[str]
    destination: NotRequired[str]
    result: NotRequired[str]
    error: NotRequired[str]
    reason: NotRequired[str]
    message: NotRequired[str]
    notes: NotRequired[str]
    executable: NotRequired[str]
    process: NotRequired[str]
    made_of: NotRequired[str]
    token: NotRequired[str]
    stop_seconds: NotRequired[float]
    wrong_guesses: NotRequired[int]
    drained_bytes: NotRequired[int]
    drain_rate: NotRequired[float]
    scheduled: NotRequired[bool]
    details: NotRequired[dict[str, float]]
    phases: NotRequired[list[PastPhase]]


class EventRow(TypedDict):
    """A line of `phos events`: what happened."""

    id: int
    time: Time
    severity: str
    kind: str
    subject: str
    text: str
    owner: NotRequired[int]


class StepRow(TypedDict):
    """A line of the plan of `phos evacuate`: what becomes of a process."""

    gpu: str
    pid: int
    action: str
    device_bytes: int
    destination: str
    why: str
    command: str


class EvacuatedRow(TypedDict):
    """The last line of `phos evacuate`."""

    gpu: str
    left: list[int]
    others: list[int]


class StartedRow(TypedDict):
    """The line of `phos run --detach`."""

    pid: int
    stdout: str
    stderr: str


class EndRow(TypedDict):
    """The line of `phos wait`."""

    pid: int
    status: int | None


class FindingRow(TypedDict):
    """A line of `phos doctor`: what was found."""

    subject: str
    level: str
    text: str
    mend: str


class KernelRow(TypedDict):
    """A line of `phos analyse FILE`: a kernel."""

    kernel: str
    parameter_bytes: int
    roles: dict[str, str]
    unknown_reads: list[str]
    unknown_writes: list[str]
    ranges_read: bool
    ranges_written: bool
    idempotent: str
    idempotent_why: list[str]


class WarmedRow(TypedDict):
    """A line of `phos warm-cache`: a file."""

    file: str
    modules: int
    kernels: int
    roles: int
    ranges: int
    failed: int
    unfinished: int


class LeftRow(TypedDict):
    """A line of `phos recover`: a process that is left."""

    pid: int
    state: str
    certain: bool


class RecoveredRow(TypedDict):
    """A line of `phos recover PID`: a process. ``done`` only where phosd was not asked."""

    pid: int
    runs: bool
    message: str
    done: NotRequired[list[str]]


class RuntimeRow(TypedDict):
    """The line of `phos setup-container-runtime`."""

    runtime: str
    device: str
    changed: list[str]
    todo: list[str]


class ToolsRow(TypedDict):
    """The line of `phos setup-analysis`."""

    installed: list[str]
    deleted: list[str]


class TrustedRow(TypedDict):
    """The line of `phos trust`."""

    pid: int
    kernel: str | None
    trusted: int


ROWS: Mapping[str, Any] = {
    "Errors": ErrorRow,
    "`phos ps`": ProcessRow,
    "`phos ps PID`": ProcessDetails,
    "`phos ps PID --kernels`": LaunchedKernelRow,
    "`phos ps PID --log`": LogRow,
    "`phos status`": ProgramRow,
    "`phos gpus`": GpuRow,
    "`phos pool`": PoolRow,
    "`--dry-run`": CheckRow,
    "Jobs": JobRow,
    "`phos jobs`": ListedJobRow,
    "`phos jobs --cancel`": CancelledRow,
    "`phos checkpoint --every off`": ScheduleEndRow,
    "`phos continue`": ContinuedRow,
    "`phos images`": ImageRow,
    "`phos images IMAGE`": ImageDetails,
    "`phos note`": NoteRow,
    "`phos export`, `phos import`, `phos push`, `phos pull`": SentRow,
    "`phos pull --list`": RemoteImageRow,
    "`phos rm`": DeletedRow,
    "`phos prune`": ThingRow,
    "`phos prune`: what was deleted": PrunedRow,
    "`phos history`": PastJobRow,
    "`phos events`": EventRow,
    "`phos evacuate`": StepRow,
    "`phos evacuate`: at the end": EvacuatedRow,
    "`phos run --detach`": StartedRow,
    "`phos wait`": EndRow,
    "`phos doctor`": FindingRow,
    "`phos analyse`": KernelRow,
    "`phos warm-cache`": WarmedRow,
    "`phos recover`": LeftRow,
    "`phos recover PID`": RecoveredRow,
    "`phos setup-container-runtime`": RuntimeRow,
    "`phos setup-analysis`": ToolsRow,
    "`phos trust`": TrustedRow,
}
"""The types by the headings of docs/reference/json.md."""
