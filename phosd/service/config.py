"""Read ``/etc/phos/phosd.toml``. Each mistake is reported with file, line and key."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phosd.engine.image.signature import ALLOWED_SIGNERS
from phosd.engine.node.kernel_analysis import AnalysisLimits
from phosd.engine.operations.admission import DiskLimits, SizeOrShare
from phosd.service.config_values import (
    address,
    at_least,
    is_loopback,
    job_count,
    number_in,
    seconds_in,
    size_in,
    size_or_share,
    truth,
    user,
)
from phosd.service.jobs.limits import JobLimits, UserLimits, limits_of
from phosd.service.jobs.schedule import PeriodicRule

DEFAULT_FILE = Path("/etc/phos/phosd.toml")

_ANALYSIS = ("background", "off")
_KEPT_FREE = SizeOrShare(share=0.01)
_MEMORY_TIER = SizeOrShare(share=0.25)


@dataclass(frozen=True)
class Config:
    """The administrator's settings. Sizes are in bytes and durations in seconds, unless the name
    gives another unit; the file may have texts with units, such as ``"16GiB"`` and ``"10min"``.
    """

    state_dir: Path = Path("/var/lib/phos")
    runtime_dir: Path = Path("/run/phos")
    staging_limit: int | None = None
    """Most memory for CRIU's files while they wait to be written to disk."""
    ring_bytes: int | None = None
    """Pinned memory of each data mover; by default the engine's own choice."""
    standby_movers: bool | None = None
    """Whether a process stands by for each GPU, to become its data mover: with nothing of the GPU,
    and some 20 MB of host memory. By default one does, but not with another ``runtime_dir``: a
    phosd on trial starts only what it uses.
    """
    shadow_limit: int | None = None
    """Most device memory of one GPU for copies during a checkpoint: a snapshot of all memory if it
    fits, else copies of the chunks that the program overwrites. By default the engine chooses. With
    0 the program waits instead.
    """
    criu: Path | None = None
    retention_days: int = 90
    """How long the history keeps jobs and events."""
    rescan_seconds: float = 3.0
    """Seconds between two scans for processes, GPUs and images."""
    analysis: str | None = None
    """Whether phosd analyses what programs launch on GPUs, to know what memory it reads and writes:
    ``background``, on a processor that has nothing else to do, or ``off``. By default it does, but
    not with another ``runtime_dir``. Without nvdisasm nothing is analysed; ``phos doctor`` says so.
    """
    analysis_module_seconds: int = 300
    """Most processor time for one analysis of a module. What takes longer stays unknown."""
    analysis_hour_seconds: int = 900
    """Most processor time for the analysis in an hour; a user has no more than half of it."""
    analysis_cache: int = 256 << 20
    """Most disk space for what was found. The least recently used goes first."""
    callback_deadline: float = 60.0
    """Seconds that a program with safe points has to come to one, if a request does not say."""
    max_jobs: int = JobLimits.jobs
    """Most jobs that run at the same time; others wait in a queue."""
    jobs_per_gpu: int = JobLimits.per_gpu
    """Most jobs that work on one GPU at the same time."""
    min_free: SizeOrShare = _KEPT_FREE
    """Free space to leave on the disk of ``state_dir``: a size or a share such as ``"5%"``. A
    checkpoint that would leave less is refused before the program is stopped.
    """
    memory_tier: SizeOrShare | None = None
    """Host memory in which images are made; they are written to the disk afterwards. A size, or a
    share of the memory; by default a quarter of it. With 0 a checkpoint waits for the disk, and so
    it does by default with another ``runtime_dir``: a phosd on trial leaves nothing mounted.
    """
    metrics: str = ""
    """Address and port for Prometheus to scrape, e.g. ``127.0.0.1:9476``; by default metrics are
    not served. Needs the Python package prometheus-client.
    """
    metrics_public: bool = False
    """Whether ``metrics`` may be an address that other machines can reach. There is no password."""
    allowed_signers: Path = ALLOWED_SIGNERS
    """The keys that may sign images from other machines: a file as ``ssh-keygen -Y verify`` reads
    it, with names of users as principals. What a key has signed may run as its user.
    """
    periodic: tuple[PeriodicRule, ...] = ()
    """Rules for periodic checkpoints. The first rule that matches a process applies."""
    limits: tuple[UserLimits, ...] = ()
    """Quotas and retention of users' images. The first rule that matches a user applies."""

    @property
    def memory_tier_limit(self) -> SizeOrShare:
        """What images may take of host memory."""
        if self.memory_tier is not None:
            return self.memory_tier
        return _MEMORY_TIER if self.runtime_dir == Config.runtime_dir else SizeOrShare()

    @property
    def stands_by(self) -> bool:
        """Whether processes stand by for data movers."""
        if self.standby_movers is not None:
            return self.standby_movers
        return self.runtime_dir == Config.runtime_dir

    @property
    def analysis_limits(self) -> AnalysisLimits | None:
        """What the analysis of kernels may take; None if there is to be none."""
        by_default = "background" if self.runtime_dir == Config.runtime_dir else "off"
        if (self.analysis or by_default) == "off":
            return None
        return AnalysisLimits(
            self.analysis_module_seconds, self.analysis_hour_seconds, self.analysis_cache
        )

    @property
    def job_limits(self) -> JobLimits:
        """How many jobs may run at the same time."""
        return JobLimits(self.max_jobs, self.jobs_per_gpu)

    @property
    def disk_limits(self) -> DiskLimits:
        """The disk space that images may take, by user and in total."""
        return DiskLimits(self.min_free, lambda user: limits_of(self.limits, user).quota)


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
    values: dict[str, Any] = {}
    problems: list[str] = []
    for kind in (_PERIODIC, _LIMITS):
        rules = table.pop(kind.name, [])
        values[kind.name] = tuple(_rules(path, text, kind, rules, problems))
    for key, value in table.items():
        try:
            values[key] = _convert(key, value)
        except ValueError as error:
            problems.append(f"{path}:{_line_of(text, key)}: {key}: {error}")
    if not values.get("metrics_public") and not is_loopback(values.get("metrics", "")):
        problems.append(
            f"{path}:{_line_of(text, 'metrics')}: metrics: {values['metrics']} can be reached by "
            "other machines; listen on 127.0.0.1, or set metrics_public = true"
        )
    if problems:
        raise ConfigError(problems)
    return Config(**values)


def as_toml(config: Config) -> str:
    """Return all settings as :func:`load` reads them; a comment stands for each that is not set."""
    lines, tables = [], []
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            for rule in value:
                tables += ["", f"[[{field.name}]]"]
                named = ((each.name, getattr(rule, each.name)) for each in fields(rule))
                tables += [f"{name} = {_literal(of)}" for name, of in named if of is not None]
        elif value in (None, ""):
            lines.append(f"# {field.name} is not set")
        else:
            lines.append(f"{field.name} = {_literal(value)}")
    return "\n".join([*lines, *tables, ""])


def _literal(value: bool | float | str | Path | SizeOrShare) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)


def _convert(key: str, value: Any) -> Any:
    match key:
        case "state_dir" | "runtime_dir" | "criu" | "allowed_signers":
            if not isinstance(value, str) or not Path(value).is_absolute():
                raise ValueError(f"{value!r} is not an absolute path")
            return Path(value)
        case "staging_limit" | "ring_bytes":
            return at_least(1 << 20, size_in(value), "1 MiB")
        case "shadow_limit":
            return size_in(value)
        case "analysis":
            if value not in _ANALYSIS:
                raise ValueError(f"{value!r} is none of {', '.join(_ANALYSIS)}")
            return value
        case "analysis_module_seconds" | "analysis_hour_seconds":
            return int(at_least(1.0, seconds_in(value), "1 s"))
        case "analysis_cache":
            return at_least(1 << 20, size_in(value), "1 MiB")
        case "retention_days":
            return at_least(1, number_in(value, int), "1 day")
        case "rescan_seconds":
            return at_least(0.5, seconds_in(value), "0.5 s")
        case "callback_deadline":
            return at_least(0.1, seconds_in(value), "0.1 s")
        case "max_jobs" | "jobs_per_gpu":
            return job_count(value)
        case "min_free":
            return size_or_share(value, "disk")
        case "memory_tier":
            return size_or_share(value, "memory")
        case "metrics":
            return address(value)
        case "metrics_public" | "standby_movers":
            return truth(value)
    known = ", ".join(f.name for f in fields(Config))
    raise ValueError(f"is not a setting of this version; there are {known}")


@dataclass(frozen=True)
class _Tables:
    """One kind of ``[[tables]]``: its rule class, how keys are converted, and which are missing."""

    name: str
    rule: type[Any]
    convert: Callable[[str, Any], Any]
    missing: Callable[[set[str]], Iterator[str]]


def _rules(path: Path, text: str, kind: _Tables, tables: Any, problems: list[str]) -> Iterator[Any]:
    """Yield a rule for each table without mistakes; add the mistakes of the others to
    ``problems``.
    """
    name = kind.name
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.append(f"{path}:{_line_of(text, name)}: {name}: write [[{name}]] tables")
        return
    for number, table in enumerate(tables, 1):
        begin = _line_of(text, name, number)
        values = {}
        found = []
        for key, value in table.items():
            try:
                values[key] = kind.convert(key, value)
            except ValueError as error:
                line = begin + _line_of("\n".join(text.splitlines()[begin:]), key)
                found.append(f"{path}:{line}: {name}.{key}: {error}")
        found += [f"{path}:{begin}: {name}: {what}" for what in kind.missing(set(table))]
        problems += found
        if not found:
            yield kind.rule(**values)


def _missing_of_periodic(keys: set[str]) -> Iterator[str]:
    if "every" not in keys:
        yield "`every` is missing (seconds, or for example '10min')"
    if not keys & {"user", "command"}:
        yield "say for whom, with `user` or `command`"


def _convert_periodic(key: str, value: Any) -> Any:
    match key:
        case "every":
            return at_least(1.0, seconds_in(value), "1 s")
        case "keep":
            return at_least(1, number_in(value, int), "1 image")
        case "user":
            return user(value)
        case "command":
            if not isinstance(value, str) or not value:
                raise ValueError(f"{value!r} is no pattern; write for example 'python *train.py*'")
            return value
    raise _no_setting_of(PeriodicRule)


def _missing_of_limits(keys: set[str]) -> Iterator[str]:
    if not keys - {"user", "keep_last"}:
        yield "say what the limits are: `quota`, `keep`, `keep_each`, `keep_days` or `keep_bytes`"


def _convert_limit(key: str, value: Any) -> Any:
    match key:
        case "user":
            return user(value)
        case "quota":
            return size_in(value)
        case "keep_bytes":
            return at_least(1 << 20, size_in(value), "1 MiB")
        case "keep" | "keep_each":
            return at_least(1, number_in(value, int), "1 image")
        case "keep_days":
            return at_least(0.01, float(number_in(value, (int, float))), "0.01 days")
        case "keep_last":
            return truth(value)
    raise _no_setting_of(UserLimits)


_PERIODIC = _Tables("periodic", PeriodicRule, _convert_periodic, _missing_of_periodic)
_LIMITS = _Tables("limits", UserLimits, _convert_limit, _missing_of_limits)


def _no_setting_of(rule: type[Any]) -> ValueError:
    known = ", ".join(f.name for f in fields(rule))
    return ValueError(f"is not a setting of a rule; there are {known}")


def _line_of(text: str, key: str, number: int = 1) -> int:
    """Return the line that sets a top-level key, or opens the ``number``-th table of that name."""
    quoted = re.escape(key)
    line = re.compile(rf"""\s*\[*\s*["']?{quoted}["']?\s*[=.\]]""")
    lines = text.splitlines()
    found = [n for n, found in enumerate(lines, 1) if line.match(found)]
    return found[number - 1] if number <= len(found) else 1
