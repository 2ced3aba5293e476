"""Show what is known of kernels: of a module's, and of those that a process has launched."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from phosd.cli.client import ask
from phosd.cli.settings import Settings
from phosd.interface.methods import PROCESS

MOST = 2_000
"""Most kernels that are shown: with long names, as templates have, one answer may hold no more
than some thousand.
"""
_FACTS = {
    "parameter_bytes": "ParameterBytes",
    "roles": "Roles",
    "unknown_reads": "UnknownReads",
    "unknown_writes": "UnknownWrites",
    "ranges_read": "RangesRead",
    "ranges_written": "RangesWritten",
    "idempotent": "Idempotent",
    "idempotent_why": "IdempotentWhy",
}
Row = Mapping[str, Any]


def launched(settings: Settings, path: str) -> list[dict[str, Any]]:
    """Return the kernels that the process at this path has launched, most first."""
    found = ask(settings, path, PROCESS, "DescribeKernels", limit=MOST)
    return [
        {
            "kernel": one["Name"],
            "module": one["Module"],
            "launches": one["Launches"],
            "suspect": one["Suspect"],
            "in_hook": one["InHook"],
            "idempotent_launches": one["IdempotentLaunches"],
            "overwriting_launches": one["OverwritingLaunches"],
            "undecided_launches": one["UndecidedLaunches"],
            "state": one["State"],
            "reason": one["Reason"],
            **{key: one.get(name) for key, name in _FACTS.items()},
        }
        for one in found
    ]


def show(settings: Settings, rows: Sequence[dict[str, Any]], *, empty: str) -> None:
    """Print kernels, one per line, and which share of them is known."""
    columns: dict[str, Callable[[Row], str]] = {
        "READ": lambda row: _offsets(row, "read"),
        "WRITTEN": lambda row: _offsets(row, "written"),
        "RANGES": _ranges,
        "AGAIN": lambda row: row["idempotent"] or "",
        "UNKNOWN": lambda row: "\n".join(_reasons(row)),
        "KERNEL": lambda row: str(row["kernel"]),
    }
    if rows and "launches" in rows[0]:
        columns = {
            "LAUNCHES": lambda row: str(row["launches"]),
            "OF THESE AGAIN": _again,
        } | columns
    settings.rows(rows, columns, empty=empty)
    if len(rows) == MOST and "launches" in rows[0]:
        settings.note(f"only the {MOST:,} kernels that were launched most; there may be more")
    if rows and not settings.json:
        settings.say("")
        settings.facts(_totals(rows))


def none_of(pid: int) -> str:
    """Say why there are no kernels to show of a process."""
    return f"no such kernels of process {pid} were counted; `phos analyse {pid}` counts for a while"


def _again(row: Row) -> str:
    """Say how many launches may be run again, may not, and of how many that is not known."""
    said = (
        (row["idempotent_launches"], "yes"),
        (row["overwriting_launches"], "no"),
        (row["undecided_launches"], "?"),
    )
    return ", ".join(f"{count} {word}" for count, word in said if count)


def _offsets(row: Row, use: str) -> str:
    return " ".join(at for at, role in (row["roles"] or {}).items() if role in (use, "both"))


def _ranges(row: Row) -> str:
    known = [use for use in ("read", "written") if row[f"ranges_{use}"]]
    return "all" if len(known) == 2 else " ".join(known)


def _reasons(row: Row) -> list[str]:
    """Return why it is not known what a kernel accesses; nothing if it is."""
    if row.get("state", "analysed") != "analysed":
        return [": ".join(filter(None, (row["state"], row["reason"])))]
    return sorted({*row["unknown_reads"], *row["unknown_writes"]})


def _totals(rows: Sequence[Row]) -> dict[str, str]:
    """Say which share is known: of kernels, and if they were launched, of their launches."""
    reasons: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for row in rows:
        weight = row.get("launches", 1)
        again[row["idempotent"] or "unknown"] += weight
        for reason in _reasons(row):
            reasons[reason] += weight

    def share(known: Callable[[Row], bool]) -> str:
        return _share(rows, known)

    return {
        "kernels": str(len(rows)),
        "launches": str(_weight(rows)) if "launches" in rows[0] else "",
        "roles": share(lambda row: not _reasons(row)),
        "write roles": share(
            lambda row: row["unknown_writes"] is not None and not row["unknown_writes"]
        ),
        "ranges": share(lambda row: _ranges(row) == "all"),
        "write ranges": share(lambda row: bool(row["ranges_written"])),
        "again": ", ".join(f"{kind} ({count})" for kind, count in again.most_common()),
        "instances": _again_in_all(rows) if "launches" in rows[0] else "",
        "unknown": ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common()),
    }


def _share(rows: Sequence[Row], known: Callable[[Row], bool]) -> str:
    found = [row for row in rows if known(row)]
    text = f"{len(found)} ({len(found) / len(rows):.0%})"
    if "launches" in rows[0]:
        text += f", {_weight(found) / max(1, _weight(rows)):.0%} of the launches"
    return text


def _again_in_all(rows: Sequence[Row]) -> str:
    keys = ("idempotent_launches", "overwriting_launches", "undecided_launches")
    return _again({key: sum(row[key] for row in rows) for key in keys})


def _weight(rows: Iterable[Row]) -> int:
    return sum(row["launches"] for row in rows)
