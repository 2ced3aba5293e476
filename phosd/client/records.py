"""Convert properties of phosd's objects to typed records.

Times are seconds since the epoch (None: unknown), durations seconds, sizes bytes. A service of
another version may send other properties: missing or mistyped ones become empty.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Properties = Mapping[str, Any]


@dataclass(frozen=True)
class Manager:
    """phosd itself: its version, what it can do, and what is wrong without stopping jobs."""

    path: str
    version: str = ""
    features: frozenset[str] = frozenset()
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A GPU. ``utilisation`` is 0..1, ``temperature`` degrees Celsius, ``power`` watts; None where
    the GPU does not report it. ``pids`` are the processes that it reports.
    """

    path: str
    ordinal: int = 0
    uuid: str = ""
    name: str = ""
    memory_total: int = 0
    memory_used: int = 0
    utilisation: float | None = None
    temperature: float | None = None
    power: float | None = None
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Process:
    """A GPU process; ``gpus`` are the paths of :class:`Gpu`. ``hook`` is how it can be saved:
    ``hooked``, ``driver`` or ``unsupported``, and ``reason`` why it is not hooked. ``every`` is
    the interval of its periodic checkpoints in seconds (0: none), of which ``keep`` images are
    kept. ``output`` has the files of its standard output and error; ``name`` is that of its
    program. ``container`` has the runtime and id of the container that it is in, and the name and
    pod where they are known; it is empty for other processes. ``slurm_step`` is the step of a Slurm
    job that it is in (``4711.0``), if it is in one.
    """

    path: str
    pid: int = 0
    start_time: int = 0
    user: int = 0
    user_name: str = ""
    command: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    device_bytes: int = 0
    hook: str = ""
    reason: str = ""
    state: str = ""
    last_image: str = ""
    every: float = 0.0
    keep: int = 0
    output: tuple[str, ...] = ()
    name: str = ""
    container: Mapping[str, str] = field(default_factory=dict)
    slurm_step: str = ""


@dataclass(frozen=True)
class Image:
    """A saved process. ``gpus`` has the UUID and the chip of each GPU; ``whole`` is the result of
    the last verification, None before the first; ``output`` and ``name`` as of a :class:`Process`,
    ``number`` tells the owner's images with that name apart, and ``note`` is what they have written
    of it. ``rehearsed``: when its restore was rehearsed last, and ``rehearsal_error`` why that
    failed.
    """

    path: str
    id: str = ""
    created: float | None = None
    owner: int = 0
    owner_name: str = ""
    pid: int = 0
    command: tuple[str, ...] = ()
    gpus: tuple[tuple[str, str], ...] = ()
    total_bytes: int = 0
    device_bytes: int = 0
    stored_bytes: int = 0
    shared_bytes: int = 0
    state: str = "durable"
    mode: str = ""
    why: str = ""
    wrong_guesses: int = 0
    parent: str = ""
    stop_seconds: float = 0.0
    verified: float | None = None
    whole: bool | None = None
    output: tuple[str, ...] = ()
    name: str = ""
    number: int = 0
    note: str = ""
    rehearsed: float | None = None
    rehearsal_error: str = ""


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
    """A job. ``progress``, ``bytes_*``, ``rate`` and ``expected_end`` refer to the current phase;
    ``progress`` is None if unknown. ``result`` is the image, the pid, where memory is, or which GPU
    became which (``0:1``). ``error`` is the name of the error that ended it, ``error_reason`` its
    code, ``message`` what happened, ``hint`` (also in the message) what to do next.
    """

    path: str
    number: int = 0
    operation: str = ""
    target: str = ""
    owner: int = 0
    owner_name: str = ""
    state: str = ""
    position: int = 0
    phase: str = ""
    stopped: bool = False
    progress: float | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    rate: float = 0.0
    started: float | None = None
    ended: float | None = None
    expected_end: float | None = None
    stop_seconds: float = 0.0
    mode: str = ""
    destination: str = ""
    why: str = ""
    wrong_guesses: int = 0
    suspects: tuple[str, ...] = ()
    drained_bytes: int = 0
    drain_rate: float = 0.0
    scheduled: bool = False
    details: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    cancelable: bool = False
    result: str = ""
    error: str = ""
    message: str = ""
    error_reason: str = ""
    hint: str = ""

    @property
    def targets(self) -> list[str]:
        """The pids that the job works on, or the image."""
        return self.target.split()

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self.state not in ("queued", "running")


Record = Manager | Gpu | Process | Image | Job

_T = TypeVar("_T")


class Values:
    """Typed access to the properties of an object, or to the fields of a row."""

    def __init__(self, properties: Properties, name_of: Callable[[int], str]) -> None:
        self._properties = properties
        self._name_of = name_of

    def _get(self, name: str, kind: type[_T], otherwise: _T) -> _T:
        value = self._properties.get(name)
        return value if isinstance(value, kind) else otherwise

    def figures(self, name: str) -> tuple[tuple[str, float], ...]:
        found = self._get(name, dict, {}).items()
        return tuple((key, value) for key, value in found if isinstance(value, float))

    def texts_by_key(self, name: str) -> Mapping[str, str]:
        found = self._get(name, dict, {}).items()
        return {key: value for key, value in found if isinstance(value, str)}

    def text(self, name: str) -> str:
        return self._get(name, str, "")

    def flag(self, name: str) -> bool:
        return self._get(name, bool, False)

    def whole(self, name: str) -> int:
        return self._get(name, int, 0)

    def user(self, name: str) -> str:
        """Return the name of the user whose id the property holds."""
        return self._name_of(self.whole(name))

    def number(self, name: str) -> float:
        return self._get(name, float, 0.0)

    def known(self, name: str) -> float | None:
        """Return a figure of a GPU, or None if negative: the GPU does not report it."""
        value = self._get(name, float, -1.0)
        return value if value >= 0 else None

    def time(self, name: str) -> float | None:
        return self.whole(name) / 1e6 or None

    def texts(self, name: str) -> tuple[str, ...]:
        return self.items(name, str)

    def items(self, name: str, kind: type[_T]) -> tuple[_T, ...]:
        return tuple(item for item in self._get(name, list, []) if isinstance(item, kind))

    def rows(self, name: str, row: Callable[..., _T]) -> tuple[_T, ...]:
        """Convert each row with ``row``; leave out rows that it cannot convert."""
        found = []
        for values in self._get(name, list, []):
            try:
                found.append(row(*values))
            except (TypeError, ValueError):
                continue
        return tuple(found)


def _manager(path: str, values: Values) -> Manager:
    return Manager(
        path,
        version=values.text("Version"),
        features=frozenset(values.texts("Features")),
        troubles=values.texts("Troubles"),
    )


def _gpu(path: str, values: Values) -> Gpu:
    return Gpu(
        path,
        ordinal=values.whole("Ordinal"),
        uuid=values.text("UUID"),
        name=values.text("Name"),
        memory_total=values.whole("MemoryTotal"),
        memory_used=values.whole("MemoryUsed"),
        utilisation=values.known("Utilisation"),
        temperature=values.known("Temperature"),
        power=values.known("Power"),
        pids=values.items("Processes", int),
    )


def _process(path: str, values: Values) -> Process:
    return Process(
        path,
        pid=values.whole("Pid"),
        start_time=values.whole("StartTime"),
        user=values.whole("User"),
        user_name=values.user("User"),
        command=values.texts("CommandLine"),
        gpus=values.texts("GPUs"),
        device_bytes=values.whole("DeviceBytes"),
        hook=values.text("HookState"),
        reason=values.text("Reason"),
        state=values.text("State"),
        last_image=values.text("LastImage"),
        every=values.number("CheckpointInterval"),
        keep=values.whole("CheckpointsKept"),
        output=values.texts("Output"),
        name=values.text("Name"),
        container=values.texts_by_key("Container"),
        slurm_step=values.text("SlurmStep"),
    )


def _image(path: str, values: Values) -> Image:
    verified = values.time("Verified")
    return Image(
        path,
        id=values.text("Id"),
        created=values.time("Created"),
        owner=values.whole("Owner"),
        owner_name=values.user("Owner"),
        pid=values.whole("Pid"),
        command=values.texts("CommandLine"),
        gpus=values.rows("GPUs", lambda uuid, chip: (str(uuid), str(chip))),
        total_bytes=values.whole("TotalBytes"),
        device_bytes=values.whole("DeviceBytes"),
        stored_bytes=values.whole("StoredBytes"),
        shared_bytes=values.whole("SharedBytes"),
        state=values.text("State") or "durable",  # an older phosd has no other
        mode=values.text("Mode"),
        why=values.text("Why"),
        wrong_guesses=values.whole("WrongGuesses"),
        parent=values.text("Parent"),
        stop_seconds=values.number("StopSeconds"),
        verified=verified,
        whole=values.flag("VerifiedWhole") if verified is not None else None,
        output=values.texts("Output"),
        name=values.text("Name"),
        number=values.whole("Number"),
        note=values.text("Note"),
        rehearsed=values.time("Rehearsed"),
        rehearsal_error=values.text("RehearsalError"),
    )


def _phase(name: Any, stopped: Any, seconds: Any, done: Any, total: Any) -> Phase:
    return Phase(str(name), bool(stopped), float(seconds), int(done), int(total))


def _job(path: str, values: Values) -> Job:
    return Job(
        path,
        number=values.whole("Number"),
        operation=values.text("Operation"),
        target=values.text("Target"),
        owner=values.whole("Owner"),
        owner_name=values.user("Owner"),
        state=values.text("State"),
        position=values.whole("Position"),
        phase=values.text("Phase"),
        stopped=values.flag("ProgramStopped"),
        progress=values.number("Progress") if values.flag("ProgressValid") else None,
        bytes_done=values.whole("BytesDone"),
        bytes_total=values.whole("BytesTotal"),
        rate=values.number("Rate"),
        started=values.time("Started"),
        ended=values.time("Ended"),
        expected_end=values.time("ExpectedEnd"),
        stop_seconds=values.number("StopSeconds"),
        mode=values.text("Mode"),
        destination=values.text("Destination"),
        why=values.text("Why"),
        wrong_guesses=values.whole("WrongGuesses"),
        suspects=values.texts("Suspects"),
        drained_bytes=values.whole("DrainedBytes"),
        drain_rate=values.number("DrainRate"),
        scheduled=values.flag("Scheduled"),
        details=values.figures("Details"),
        notes=values.texts("Notes"),
        phases=values.rows("Phases", _phase),
        cancelable=values.flag("Cancelable"),
        result=values.text("Result"),
        error=values.text("Error"),
        message=values.text("Message"),
        error_reason=values.text("ErrorReason"),
        hint=values.text("Hint"),
    )


_KINDS: dict[str, Callable[[str, Values], Record]] = {
    "org.phos.Manager1": _manager,
    "org.phos.Gpu1": _gpu,
    "org.phos.Process1": _process,
    "org.phos.Image1": _image,
    "org.phos.Job1": _job,
}


def record_of(
    path: str, interface: str, properties: Properties, name_of: Callable[[int], str]
) -> Record | None:
    """Return the record of an object, or None for an interface unknown to this version.

    ``name_of`` returns the name of a user id.
    """
    kind = _KINDS.get(interface)
    return kind(path, Values(properties, name_of)) if kind else None
