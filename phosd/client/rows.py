"""Page through and unpack rows of phosd's history."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

_PHASE = ("name", "begin", "seconds", "bytes", "stopped")

_PAGE = 500
"""Rows per call: phosd takes a quarter of a millisecond for each."""


def first_page(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the first ``ListHistory`` call for ``wanted["limit"]`` rows in all."""
    return {**wanted, "limit": min(wanted["limit"], _PAGE)}


def next_page(
    asked: Mapping[str, Any], found: Sequence[Mapping[str, Any]], left: int
) -> dict[str, Any] | None:
    """Return the options of the call after the one that returned ``found``, when ``left`` more rows
    are wanted; None after the last page.
    """
    if left <= 0 or len(found) < asked["limit"]:
        return None
    return {**asked, "limit": min(left, _PAGE), "before": found[-1]["id"]}


async def read_pages(
    read: Callable[..., Awaitable[Sequence[Mapping[str, Any]]]], limit: int, **options: Any
) -> list[Mapping[str, Any]]:
    """Return at most ``limit`` past jobs, newest first, as rows of ``ListHistory``, which ``read``
    calls with the options of a page.
    """
    rows: list[Mapping[str, Any]] = []
    page: dict[str, Any] | None = first_page({"limit": limit, **options})
    while page is not None:
        found = await read(**page)
        rows += found
        page = next_page(page, found, limit - len(rows))
    return rows


def unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``ListHistory`` row that JSON output shows unpacked."""
    return {
        "details": json.loads(row.get("details") or "{}"),
        "scheduled": bool(row.get("scheduled")),
        "phases": [dict(zip(_PHASE, phase, strict=True)) for phase in row.get("phases", ())],
    }
