"""Fault points: only what PHOS_FAULT names goes wrong, at the visit it names."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phosd.engine import faults
from phosd.engine.faults import Kind, Point, parse, point
from phosd.errors import Internal, InvalidOption


def test_the_variable_names_point_visit_and_kind() -> None:
    assert parse("") == {}
    assert parse("pack-sync") == {"pack-sync": (1, Kind.RAISE)}
    assert parse("pack-sync:kill") == {"pack-sync": (1, Kind.KILL)}
    assert parse("pack-sync:3:short,mover-write:enospc") == {
        "pack-sync": (3, Kind.SHORT),
        "mover-write": (1, Kind.ENOSPC),
    }


@pytest.mark.parametrize(
    "text", ["nothing", "pack-sync:0", "pack-sync:1:fire", "pack-sync:1:kill:x"]
)
def test_what_names_no_fault_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="names no fault"):
        parse(text)


def test_a_fault_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_visits", {})
    monkeypatch.setattr(faults, "_armed", parse("pack-sync:2,pack-create:enospc,mover-read:short"))
    assert not point(Point.PACK_SYNC)
    with pytest.raises(Internal, match="fault point pack-sync"):
        point(Point.PACK_SYNC)
    assert not point(Point.PACK_SYNC)
    with pytest.raises(OSError, match="No space left") as caught:
        point(Point.PACK_CREATE)
    assert caught.value.errno == errno.ENOSPC
    assert point(Point.MOVER_READ)
    assert not point(Point.MOVER_READ)
    assert not point(Point.MOVER_WRITE)


def test_the_hook_has_the_same_names() -> None:
    """Those that begin with ``hook-``, and no others."""
    definitions = Path(__file__).parents[3] / "phosd/hook/faults.def"
    names = re.findall(r'PHOS_FAULT_POINT\(\w+, "([^"]+)"\)', definitions.read_text())
    assert names == [p for p in Point if p.startswith("hook-")]


@pytest.mark.parametrize(("kind", "status"), [("kill", -9), ("hang", None)])
def test_a_process_is_killed_or_hangs(kind: str, status: int | None) -> None:
    script = "from phosd.engine.faults import *; point(Point.PACK_SYNC)"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env={"PHOS_FAULT": f"pack-sync:{kind}"},
    )
    try:
        ended: int | None = process.wait(60 if status is not None else 1)
    except subprocess.TimeoutExpired:
        ended = None
    process.kill()
    process.wait()
    assert ended == status
