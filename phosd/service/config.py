"""``/etc/phos/phosd.toml``. Every mistake in it is reported with file, line and key."""

import pwd
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from phosd.engine.process import GpuProcess
from phosd.service.schedule import KEEP

DEFAULT_FILE = Path("/etc/phos/phosd.toml")

_Number = TypeVar("_Number", int, float)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024 ** (n + 1) for n, unit in enumerate("KMGT")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*")


@dataclass(frozen=True)
class PeriodicRule:
    """Processes that are checkpointed every so many seconds, the last ``keep`` images kept.

    ``command`` is a pattern with ``*`` and ``?`` for the whole command line; ``user`` is a user id.
    """

    every: float
    keep: int = KEEP
    user: int | None = None
    command: str = "*"

    def fits(self, process: GpuProcess) -> bool:
        """Whether the rule is about this process."""
        theirs = self.user is None or self.user == process.uid
        return theirs and fnmatchcase(" ".join(process.command), self.command)


@dataclass(frozen=True)
class Config:
    """What the administrator decides. Sizes are in bytes, times in the unit that the name gives."""

    state_dir: Path = Path("/var/lib/phos")
    runtime_dir: Path = Path("/run/phos")
    staging_limit: int | None = None
    """Most memory that CRIU's files may take while they wait to be written to disk."""
    ring_bytes: int | None = None
    """Pinned memory of each data mover; by default the engine's own choice."""
    shadow_limit: int | None = None
    """Most device memory of a GPU for what a program overwrites while it is saved; by default the
    engine's own choice. 0 is possible: the program waits instead."""
    criu: Path | None = None
    retention_days: int = 90
    """How long jobs and events stay in the history."""
    rescan_seconds: float = 3.0
    periodic: tuple[PeriodicRule, ...] = ()
    """The first rule that fits a process holds."""


class ConfigError(Exception):
    """All mistakes of one file, a line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: Path) -> Config:
    """Read the file. A missing file means the defaults. Raises :class:`ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: {error}"]) from error
    values: dict[str, Any] = {}
    problems: list[str] = []
    rules = table.pop("periodic", [])
    values["periodic"] = tuple(_rules(path, text, rules, problems))
    for key, value in table.items():
        try:
            values[key] = _convert(key, value)
        except ValueError as error:
            problems.append(f"{path}:{_line_of(text, key)}: {key}: {error}")
    if problems:
        raise ConfigError(problems)
    return Config(**values)


def size(text: str | int) -> int:
    """Bytes of ``"16 GiB"``, ``"500M"`` or a plain number. Raises :class:`ValueError`."""
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or for example '16GiB'")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _convert(key: str, value: Any) -> Any:
    match key:
        case "state_dir" | "runtime_dir" | "criu":
            if not isinstance(value, str) or not Path(value).is_absolute():
                raise ValueError(f"{value!r} is not an absolute path")
            return Path(value)
        case "staging_limit" | "ring_bytes":
            return _at_least(1 << 20, _size(value), "1 MiB")
        case "shadow_limit":
            return _size(value)
        case "retention_days":
            return _at_least(1, _number(value, int), "1 day")
        case "rescan_seconds":
            return _at_least(0.5, float(_number(value, (int, float))), "0.5 s")
    known = ", ".join(f.name for f in fields(Config))
    raise ValueError(f"is not a setting of this version; there are {known}")


def _rules(path: Path, text: str, tables: Any, problems: list[str]) -> Iterator[PeriodicRule]:
    """The rules of ``[[periodic]]`` tables that have no mistakes; the mistakes of the others."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.append(f"{path}:{_line_of(text, 'periodic')}: periodic: write [[periodic]] tables")
        return
    for number, table in enumerate(tables, 1):
        begin = _line_of(text, "periodic", number)
        values = {}
        found = []
        for key, value in table.items():
            try:
                values[key] = _convert_rule(key, value)
            except ValueError as error:
                line = begin + _line_of("\n".join(text.splitlines()[begin:]), key)
                found.append(f"{path}:{line}: periodic.{key}: {error}")
        if "every" not in table:
            found.append(f"{path}:{begin}: periodic: `every` is missing (seconds)")
        if not table.keys() & {"user", "command"}:
            found.append(f"{path}:{begin}: periodic: say for whom, with `user` or `command`")
        problems += found
        if not found:
            yield PeriodicRule(**values)


def _convert_rule(key: str, value: Any) -> Any:
    match key:
        case "every":
            return _at_least(1.0, float(_number(value, (int, float))), "1 s")
        case "keep":
            return _at_least(1, _number(value, int), "1 image")
        case "user":
            return _user(value)
        case "command":
            if not isinstance(value, str) or not value:
                raise ValueError(f"{value!r} is no pattern; write for example 'python *train.py*'")
            return value
    known = ", ".join(f.name for f in fields(PeriodicRule))
    raise ValueError(f"is not a setting of a rule; there are {known}")


def _user(value: Any) -> int:
    """The id of a user, given by number or by name."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    try:
        return pwd.getpwnam(value).pw_uid
    except (KeyError, TypeError):
        raise ValueError(f"there is no user {value!r}") from None


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write bytes or for example '16GiB'")
    return size(value)


def _number(value: Any, kinds: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{value!r} is not a number")
    return value


def _at_least(least: _Number, value: _Number, name: str) -> _Number:
    if value < least:
        raise ValueError(f"{value} is less than the least that works, {name}")
    return value


def _line_of(text: str, key: str, number: int = 1) -> int:
    """The line that sets a key of the top level, or opens the ``number``-th table of that name."""
    quoted = re.escape(key)
    line = re.compile(rf"""\s*\[*\s*["']?{quoted}["']?\s*[=.\]]""")
    lines = text.splitlines()
    found = [n for n, found in enumerate(lines, 1) if line.match(found)]
    return found[number - 1] if number <= len(found) else 1
