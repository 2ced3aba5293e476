"""What users who are not root are told of programs that stand still."""

import json
import re
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from tests.node.checkpoint_restore.conftest import Starter, place, start
from tests.system.cli.test_recover import phos

__all__ = ["place", "start"]


def test_a_suspended_program_is_nobodys_concern(
    place: Path, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it is suspended stands in a folder into which only root may look."""
    place.chmod(0o755)
    monkeypatch.setenv("PHOS_RUNTIME_DIR", str(place / "run"))
    with Node(NodeConfig(place / "state", place / "run")) as node:
        target = start("single")
        target.wait_for_steps(3)
        suspend(node, target.pid, SuspendOptions(), Progress())
        try:
            for words in ("recover", "doctor"):
                done = phos(words, uid=65534)
                assert done.stderr == ""
                rows = [json.loads(line) for line in done.stdout.splitlines()]
                assert not [row for row in rows if re.search(rf"\b{target.pid}\b", str(row))]
        finally:
            resume(node, target.pid, ResumeOptions(), Progress())
        assert driver_checkpoint.state(target.pid) is driver_checkpoint.State.RUNNING


def test_a_checkout_that_the_user_may_not_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/root`` is closed on most machines."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("PHOS_NATIVE_DIR", str(closed / "native"))
    done = phos("doctor", uid=65534)
    assert done.stderr == ""
    assert {json.loads(line)["subject"] for line in done.stdout.splitlines()} >= {"hook", "digest"}
    closed.chmod(0o755)
    state = closed / "state"
    state.mkdir(mode=0o700)
    for folder in (state, state / "images"):
        done = phos("doctor", "--state-dir", str(folder), uid=65534)
        rows = {row["subject"]: row for row in map(json.loads, done.stdout.splitlines())}
        assert (done.stderr, rows["space"]["text"].endswith(f"free for images in {folder}")) == (
            "",
            True,
        )
