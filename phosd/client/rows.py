"""Rows of phosd's history, as clients write them down."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_PHASE = ("name", "begin", "seconds", "bytes", "stopped")

_PAGE = 500
"""Rows of one call: phosd takes a quarter of a millisecond for each."""


def first_page(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the first call of ``ListHistory`` for as many rows as ``wanted`` limits."""
    return {**wanted, "limit": min(wanted["limit"], _PAGE)}


def next_page(
    asked: Mapping[str, Any], found: Sequence[Mapping[str, Any]], left: int
) -> dict[str, Any] | None:
    """The options of the call after one that ``found`` rows, with ``left`` still wanted; None when
    there is nothing more.
    """
    if left <= 0 or len(found) < asked["limit"]:
        return None
    return {**asked, "limit": min(left, _PAGE), "before": found[-1]["id"]}


def unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row of ``ListHistory`` has a form of its own, for JSON."""
    return {
        "details": json.loads(row.get("details") or "{}"),
        "phases": [dict(zip(_PHASE, phase, strict=True)) for phase in row.get("phases", ())],
    }
