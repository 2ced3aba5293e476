"""The software GPU computes what the CPU's references and a recorded GPU computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phosd.engine.system.native import softgpu_folder

ROOT = Path(__file__).resolve().parents[3]
RECORDING = Path(__file__).with_name("h200.npz")


def _run(*arguments: str, environment: dict[str, str] | None = None) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(softgpu_folder()), **(environment or {})}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/native/corpus/run.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_references(tmp_path: Path) -> None:
    recording = tmp_path / "soft.npz"
    assert "0 failures" in _run("--record", str(recording))
    assert recording.stat().st_size < 2_000_000


@pytest.mark.rotated(of=2)
def test_each_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    recording = tmp_path / "soft.npz"
    _run("--record", str(recording))
    assert "0 failures" in _run(
        "--compare", str(recording), environment={"PHOS_SOFTGPU_ISA": "base"}
    )


def test_like_the_recorded_gpu() -> None:
    assert "0 failures" in _run("--compare", str(RECORDING))
