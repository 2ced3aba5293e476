"""Read ``/etc/phos/phosd.toml``. Each mistake is reported with file, line and key."""

import json
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import fields

from phosd.engine.image.signature import ALLOWED_SIGNERS
from phosd.engine.node.kernel_analysis import AnalysisLimits
from phosd.engine.operations.admission import DiskLimits, SizeOrShare
from phosd.service.config_values import (
    LEAST_SECOND,
    AbsolutePath,
    Address,
    Duration,
    LargeSize,
    Share,
    Size,
    Truth,
    about,
    example,
    is_loopback,
    literal,
    read,
    schema,
)
from phosd.service.jobs.limits import MOST_JOBS, JobLimits, KeptFile, UserLimits, limits_of
from phosd.service.jobs.pool import PoolRule
from phosd.service.jobs.schedule import PeriodicRule

DEFAULT_FILE = Path("/etc/phos/phosd.toml")
STATE_DIR = Path("/var/lib/phos")
RUNTIME_DIR = Path("/run/phos")

_Analysis = Annotated[
    Literal["background", "off"], Meta(title="'background' or 'off'", examples=["background"])
]
_WholeDays = Annotated[int, Meta(ge=1, title="a number of days, at least 1", examples=[90])]
_Jobs = Annotated[
    int, Meta(ge=1, le=MOST_JOBS, title=f"a number of jobs from 1 to {MOST_JOBS}", examples=[16])
]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The administrator's settings. Sizes are in bytes and durations in seconds, unless the name
    gives another unit; the file may have texts with units, such as ``"16GiB"`` and ``"10min"``.
    """

    state_dir: Annotated[AbsolutePath, about("Where images and the history are.")] = STATE_DIR
    runtime_dir: Annotated[AbsolutePath, about("Where sockets and the journal are.")] = RUNTIME_DIR
    staging_limit: Annotated[
        LargeSize | None,
        about("""Most memory for CRIU's files while they wait to be written to disk; by default a
            quarter of what is free."""),
    ] = None
    ring_bytes: Annotated[
        LargeSize | None, about("Pinned memory of each data mover; by default the engine's choice.")
    ] = None
    standby_movers: Annotated[
        Truth | None,
        about("""Whether a process stands by for each GPU, to become its data mover: with nothing of
            the GPU, and some 20 MB of host memory. By default one does, but not with another
            `runtime_dir`: a phosd on trial starts only what it uses."""),
    ] = None
    shadow_limit: Annotated[
        Size | None,
        about("""Most device memory of one GPU for copies during a checkpoint: a snapshot of all
            memory if it fits, else copies of the chunks that the program overwrites. By default the
            engine chooses. With 0 the program waits instead."""),
    ] = None
    criu: Annotated[
        AbsolutePath | None, about("The CRIU to use; by default phosd's own, else the system's.")
    ] = None
    retention_days: Annotated[_WholeDays, about("How long the history keeps jobs and events.")] = 90
    rescan_seconds: Annotated[
        Duration,
        Meta(ge=0.5, title="a duration of at least 0.5 s"),
        about("The time between two scans for processes, GPUs and images."),
    ] = 3.0
    analysis: Annotated[
        _Analysis | None,
        about("""Whether phosd analyses what programs launch on GPUs, to know what memory it reads
            and writes: on a processor that has nothing else to do, or not at all. By default it
            does, but not with another `runtime_dir`. Without nvdisasm nothing is analysed; `phos
            doctor` says so."""),
    ] = None
    analysis_module_seconds: Annotated[
        Duration,
        LEAST_SECOND,
        about("Most processor time for a module. What takes longer stays unknown."),
    ] = 300
    analysis_hour_seconds: Annotated[
        Duration,
        LEAST_SECOND,
        about("Most processor time in an hour; a user has no more than half of it."),
    ] = 900
    analysis_cache: Annotated[
        LargeSize, about("Most disk space for what was found. The least recently used goes first.")
    ] = 256 << 20
    allow_unsafe_driver: Annotated[
        Truth,
        about("""Whether programs are saved, suspended and moved by a release of the NVIDIA driver
            that is known to end some of them meanwhile; `phos doctor` names it."""),
    ] = False
    callback_deadline: Annotated[
        Duration,
        Meta(ge=0.1, title="a duration of at least 0.1 s"),
        about("For a program with safe points to come to one, if a request does not say."),
    ] = 60.0
    max_jobs: Annotated[
        _Jobs, about("Most jobs that run at the same time; others wait in a queue.")
    ] = JobLimits.jobs
    jobs_per_gpu: Annotated[_Jobs, about("Most jobs on one GPU at a time.")] = JobLimits.per_gpu
    min_free: Annotated[
        Share,
        about("""Free space to leave on the disk of `state_dir`. A checkpoint that would leave less
            is refused before the program is stopped."""),
    ] = SizeOrShare(share=0.01)
    memory_tier: Annotated[
        Share | None,
        about("""Host memory in which images are made; they are written to the disk afterwards. By
            default a quarter of it. With 0 a checkpoint waits for the disk, and so it does by
            default with another `runtime_dir`: a phosd on trial leaves nothing mounted."""),
    ] = None
    metrics: Annotated[
        Address,
        about("""Where Prometheus may ask for metrics; by default nowhere. Needs the Python package
            prometheus-client."""),
    ] = ""
    metrics_public: Annotated[
        Truth, about("Whether `metrics` may be what other machines reach. There is no password.")
    ] = False
    allowed_signers: Annotated[
        AbsolutePath,
        about("""The keys that may sign images from other machines: a file as `ssh-keygen -Y verify`
            reads it, with users as principals. What a key has signed may run as its user."""),
    ] = ALLOWED_SIGNERS
    periodic: Annotated[
        tuple[PeriodicRule, ...],
        about("Rules for periodic checkpoints. The first one that matches a process applies."),
    ] = ()
    limits: Annotated[
        tuple[UserLimits, ...],
        about("Quotas and retention of images. The first rule that matches a user applies."),
    ] = ()
    files: Annotated[
        tuple[KeptFile, ...],
        about("Files that are saved with programs, open or not. All that match a user apply."),
    ] = ()
    pools: Annotated[
        tuple[PoolRule, ...], about("Pools of programs that are started in a moment.")
    ] = ()

    @property
    def memory_tier_limit(self) -> SizeOrShare:
        """What images may take of host memory."""
        if self.memory_tier is not None:
            return self.memory_tier
        return SizeOrShare(share=0.25 if self._is_usual else 0.0)

    @property
    def stands_by(self) -> bool:
        """Whether processes stand by for data movers."""
        return self._is_usual if self.standby_movers is None else self.standby_movers

    @property
    def analysis_limits(self) -> AnalysisLimits | None:
        """What the analysis of kernels may take; None if there is to be none."""
        if (self.analysis or ("background" if self._is_usual else "off")) == "off":
            return None
        seconds = int(self.analysis_module_seconds), int(self.analysis_hour_seconds)
        return AnalysisLimits(*seconds, self.analysis_cache)

    @property
    def job_limits(self) -> JobLimits:
        """How many jobs may run at the same time."""
        return JobLimits(self.max_jobs, self.jobs_per_gpu)

    @property
    def disk_limits(self) -> DiskLimits:
        """The disk space that images may take, by user and in total."""
        return DiskLimits(self.min_free, lambda user: limits_of(self.limits, user).quota)

    @property
    def _is_usual(self) -> bool:
        """Whether this is the node's own phosd, and none on trial."""
        return self.runtime_dir == RUNTIME_DIR


_RULES: dict[str, tuple[type[msgspec.Struct], str, tuple[str, ...]]] = {
    "periodic": (PeriodicRule, "say for whom", ("user", "command")),
    "limits": (
        *(UserLimits, "say what the limits are"),
        ("quota", "keep", "keep_each", "keep_days", "keep_bytes", "keep_versions"),
    ),
    "files": (KeptFile, "say which", ("path",)),
    "pools": (PoolRule, "say which", ("name",)),
}
"""The class of each kind of ``[[tables]]``, and the keys of which a table needs one, and why."""


class ConfigError(Exception):
    """All mistakes in one file, one per line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: Path, *, optional: bool = False) -> Config:
    """Read the file. Return the defaults when a file that is ``optional`` does not exist. Raises
    :class:`ConfigError`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if optional:
            return Config()
        raise ConfigError([f"{path}: there is no such file; make it, or name another"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: {error}"]) from error
    file = _File(path, text.splitlines())
    values = file.values_of(Config, table)
    metrics = values.get("metrics", "")
    if not is_loopback(metrics) and not values.get("metrics_public"):
        advice = "listen on 127.0.0.1, or set metrics_public = true"
        file.note("metrics", f"{metrics} can be reached by other machines; {advice}")
    for name, count in Counter(pool.name for pool in values.get("pools", ())).items():
        if count > 1:
            file.note("pools", f"{count} have the name {name}; give each another one")
    if file.problems:
        raise ConfigError(file.problems)
    return Config(**values)


@dataclass
class _File:
    """A file that is read, and the mistakes found in it so far."""

    path: Path
    lines: list[str]
    problems: list[str] = field(default_factory=list)

    def values_of(
        self, kind: type[msgspec.Struct], table: dict[str, Any], above: str = "", begin: int = 0
    ) -> dict[str, Any]:
        """Return the values without mistakes of a table, whose keys follow the line ``begin``."""
        kinds = {f.name: f.type for f in fields(kind)}
        values = {}
        for key, value in table.items():
            try:
                if key not in kinds:
                    known = ", ".join(kinds)
                    raise ValueError(f"is not a setting of this version; there are {known}")
                values[key] = self._rules(key, value) if key in _RULES else read(kinds[key], value)
            except ValueError as error:
                self.note(above + key, str(error), self._line_of(key, begin))
        for f in fields(kind):
            if f.required and f.name not in table:
                self.note(above + f.name, f"is missing; write for example {example(f.type)}", begin)
        return values

    def _rules(self, name: str, tables: Any) -> tuple[Any, ...]:
        """Return a rule for each table without mistakes."""
        kind, ask, needed = _RULES[name]
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ValueError(f"write [[{name}]] tables")
        rules = []
        for number, table in enumerate(tables, 1):
            before, begin = len(self.problems), self._line_of(name, number=number)
            values = self.values_of(kind, table, f"{name}.", begin)
            if not table.keys() & needed:
                self.note(name, f"{ask}: `{'` or `'.join(needed)}`", begin)
            if len(self.problems) == before:
                try:
                    rules.append(kind(**values))
                except ValueError as error:  # each value is good, and together they are not
                    self.note(name, str(error), begin)
        return tuple(rules)

    def note(self, key: str, what: str, line: int = 0) -> None:
        """Note a mistake, by default in the first line that sets the key."""
        self.problems.append(f"{self.path}:{line or self._line_of(key)}: {key}: {what}")

    def _line_of(self, key: str, begin: int = 0, number: int = 1) -> int:
        """Return the first line after ``begin`` that sets a key, or opens a table of that name for
        the ``number``-th time.
        """
        line = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[=.\]]""")
        found = [n for n, text in enumerate(self.lines[begin:], begin + 1) if line.match(text)]
        return found[number - 1] if number <= len(found) else begin + 1


def as_toml(config: Config) -> str:
    """Return all settings as :func:`load` reads them; a comment stands for each that is not set."""
    lines, tables = [], []
    for name, value in msgspec.structs.asdict(config).items():
        if isinstance(value, tuple):
            for rule in value:
                of = msgspec.structs.asdict(rule).items()
                tables += ["", f"[[{name}]]"]
                tables += [f"{key} = {literal(each)}" for key, each in of if each is not None]
        elif value in (None, ""):
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{name} = {literal(value)}")
    return "\n".join([*lines, *tables, ""])


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the file."""
    found = _schema_of(Config)
    for name, (kind, _, needed) in _RULES.items():
        one_of = [{"required": [key]} for key in needed]
        found["properties"][name]["items"] = {**_schema_of(kind), "anyOf": one_of}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    keys = {f.name: schema(f.type) for f in fields(kind)}
    for f in fields(kind):
        if f.default not in (msgspec.NODEFAULT, None, "", ()):
            keys[f.name]["default"] = json.loads(literal(f.default))
    found = {"type": "object", "properties": keys, "additionalProperties": False}
    required = [f.name for f in fields(kind) if f.required]
    return {**found, "required": required} if required else found
