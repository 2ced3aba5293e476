"""``/etc/phos/phosd.toml``. Every mistake in it is reported with file, line and key."""

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

DEFAULT_FILE = Path("/etc/phos/phosd.toml")

_Number = TypeVar("_Number", int, float)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024 ** (n + 1) for n, unit in enumerate("KMGT")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*")


@dataclass(frozen=True)
class Config:
    """What the administrator decides. Sizes are in bytes, times in the unit that the name gives."""

    state_dir: Path = Path("/var/lib/phos")
    runtime_dir: Path = Path("/run/phos")
    staging_limit: int | None = None
    """Most memory that CRIU's files may take while they wait to be written to disk."""
    ring_bytes: int | None = None
    """Pinned memory of each data mover; by default the engine's own choice."""
    criu: Path | None = None
    retention_days: int = 90
    """How long jobs and events stay in the history."""
    rescan_seconds: float = 3.0


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
    problems = []
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
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise ValueError(f"{value!r} is not a size; write bytes or for example '16GiB'")
            return _at_least(1 << 20, size(value), "1 MiB")
        case "retention_days":
            return _at_least(1, _number(value, int), "1 day")
        case "rescan_seconds":
            return _at_least(0.5, float(_number(value, (int, float))), "0.5 s")
    known = ", ".join(f.name for f in fields(Config))
    raise ValueError(f"is not a setting of this version; there are {known}")


def _number(value: Any, kinds: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{value!r} is not a number")
    return value


def _at_least(least: _Number, value: _Number, name: str) -> _Number:
    if value < least:
        raise ValueError(f"{value} is less than the least that works, {name}")
    return value


def _line_of(text: str, key: str) -> int:
    """The line that sets a key of the top level, or opens the table of that name."""
    quoted = re.escape(key)
    line = re.compile(rf"""\s*\[*\s*["']?{quoted}["']?\s*[=.\]]""")
    lines = text.splitlines()
    return next((n for n, found in enumerate(lines, 1) if line.match(found)), 1)
