"""Rows of phosd's history, as clients write them down."""

import json
from collections.abc import Mapping
from typing import Any

_PHASE = ("name", "begin", "seconds", "bytes", "stopped")


def unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row of ``ListHistory`` has a form of its own, for JSON."""
    return {
        "details": json.loads(row.get("details") or "{}"),
        "phases": [dict(zip(_PHASE, phase, strict=True)) for phase in row.get("phases", ())],
    }
