"""Export the history to a file: CSV for spreadsheets, JSON with all fields."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from phosd.client.rows import unpacked

Row = Mapping[str, Any]
_COLUMNS = (
    "id", "operation", "target", "owner", "state", "started", "ended", "mode", "why",
    "stop_seconds", "drained_bytes", "drain_rate", "wrong_guesses", "scheduled", "executable",
    "result", "error", "message",
)  # fmt: skip
_TIMES = ("started", "ended")


def trouble(text: str) -> str:
    """Return why nothing can be exported to this file; an empty string if it can be tried."""
    path = Path(text).expanduser()
    if path.suffix not in (".csv", ".json"):
        return "the name must end with .csv or .json, which says what is written"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; name one that is there"
    return f"{path} is there already; choose another name" if path.exists() else ""


def write(text: str, rows: Sequence[Row]) -> Path:
    """Write rows of ``ListHistory`` to a new file that only its owner may read; return its path.

    A name ending with ``.csv`` gives one line per job with times in UTC, ``.json`` a list of the
    objects of ``phos history --json``. Raises :class:`OSError`, also when the file exists.
    """
    path = Path(text).expanduser().absolute()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with ExitStack() as undo:
        undo.callback(path.unlink)  # an incomplete file could be mistaken for the whole history
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                _write_csv(file, rows)
            else:
                json.dump([dict(row) | unpacked(row) for row in rows], file, indent=1)
        undo.pop_all()
    return path


def _write_csv(file: IO[str], rows: Sequence[Row]) -> None:
    writer = csv.DictWriter(file, _COLUMNS, restval="", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        times = {name: _utc(row[name]) for name in _TIMES if row.get(name) is not None}
        writer.writerow(dict(row) | times)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
