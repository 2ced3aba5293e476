"""Root imports nothing from the folder that it happens to be in, which others may write to."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_worker import Orders
from phosd.engine.node.node import Node, NodeConfig
from tests.node.criu.life import COUNTER, Life


@pytest.fixture
def sprung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that appears when a Python imports something from the current folder."""
    trap, sprung = tmp_path / "trap", tmp_path / "sprung"
    trap.mkdir()
    for name in ("json", "msgspec", "phosd"):
        (trap / f"{name}.py").write_text(f"open({str(sprung)!r}, 'w')\n")
    monkeypatch.chdir(trap)
    return sprung


def test_the_file_worker(sprung: Path) -> None:
    assert file_worker.work(Orders(0, 0, (), "check")).problems == ()
    assert not sprung.exists()


def test_a_mover(sprung: Path, tmp_path: Path) -> None:
    place = tmp_path / "node"
    with Node(NodeConfig(state_dir=place / "state", runtime_dir=place / "run")) as node:
        node.movers.mover(0)
    assert not sprung.exists()


def test_the_restore_shim(sprung: Path, lives: Callable[[int], Life]) -> None:
    """It holds the other end of a pipe."""
    life = lives(0)
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer, stderr=writer)
    os.close(writer)
    os.read(reader, 1)
    life.dump()
    life.kill()
    life.restore(output=life.log)
    os.close(reader)
    life.counts_on()
    assert not sprung.exists()
