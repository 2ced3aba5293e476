"""``phos recover`` and ``phos doctor``: processes that somebody has left standing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.job.affected import AffectedProcess, AffectedSet
from phosd.engine.job.journal import JobRecord, Journal
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.discovery import discover_group
from phosd.engine.system.instance_lock import alone
from phosd.engine.system.procfs import boot_id, process_id
from phosd.errors import Busy
from tests.node.checkpoint_restore.conftest import Starter, place, start, undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.support.harness import Target, wait_until
from tests.system.faults.daemon_under_fault import Plant

__all__ = ["place", "start", "undisturbed"]


AS_USER = (
    "import os, sys\n"
    "import sysconfig\n"  # all at once: other users may not look into every checkout
    "from cuda.bindings import driver\n"
    "from phosd.cli.main import main, named\n"
    "list(map(named, main.commands))\n"
    "uid = int(sys.argv.pop(1))\n"
    "os.setgroups([]), os.setresgid(uid, uid, uid), os.setresuid(uid, uid, uid)\n"
    "main(prog_name='phos')\n"
)


def phos(*words: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
    """The command with ``--json``."""
    return subprocess.run(
        [sys.executable, "-c", AS_USER, str(uid), "--json", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def target(start: Starter, place: Path) -> Iterator[Target]:
    program = start("single")
    program.wait_for_steps(3)
    yield program


def recover(place: Path, *words: str) -> list[dict[str, object]]:
    done = phos("recover", f"--runtime-dir={place / 'run'}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def listed(place: Path, target: Target) -> list[dict[str, object]]:
    """What is said of the target. Others on this machine do not matter."""
    return [row for row in recover(place) if row["pid"] == target.pid]


@pytest.mark.parametrize("steps", ["lock", "checkpoint"])
def test_another_tool_left_it_to_the_driver(
    steps: str, target: Target, place: Path, undisturbed: Undisturbed
) -> None:
    """As ``cuda-checkpoint`` does it, which knows nothing of phosd."""
    assert listed(place, target) == []
    driver_checkpoint.lock(target.pid)
    if steps == "checkpoint":
        driver_checkpoint.checkpoint(target.pid)
    word = {"lock": "locked", "checkpoint": "checkpointed"}[steps]
    assert listed(place, target) == [
        {
            "pid": target.pid,
            "state": f"{word} by the driver's checkpoint",
            "certain": True,
        }
    ]
    (row,) = recover(place, str(target.pid))
    assert (row["pid"], row["runs"]) == (target.pid, True)
    assert "brought back from the driver's checkpoint" in str(row["message"])
    computes_right(target, undisturbed)
    (row,) = recover(place, str(target.pid))
    assert row["message"] == f"process {target.pid} runs; there was nothing to do"


def test_an_engine_that_died_left_it_parked(
    target: Target, place: Path, undisturbed: Undisturbed
) -> None:
    """The mover has the memory; the hook is woken."""
    leave_parked(place, target.pid)
    (row,) = listed(place, target)
    assert "parked" in str(row["state"])
    (row,) = recover(place, str(target.pid))
    assert "given back its parked memory" in str(row["message"])
    computes_right(target, undisturbed)


def leave_parked(place: Path, pid: int) -> None:
    """Let another process park it and be killed."""
    script = f"""
import os, pathlib
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.program.discovery import discover_group
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.memory.parking import parked
from phosd.engine.job.progress import Progress
place = pathlib.Path({str(place)!r})
node = Node(NodeConfig(place / "state", place / "run"))
found = discover_group({pid}, place / "run", lambda tree: None)
with found as group, node.kept_memory.of(group) as memory:
    memory.take(group.links)
    progress = Progress()
    progress.about_to_touch(group.affected)
    with closed_gates(group.links, progress):
        memory.take_all(group.links)
        with parked(group.links, memory):
            os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == -9


def test_a_parked_process_is_not_taken_for_one_without_a_hook(
    target: Target, place: Path, undisturbed: Undisturbed
) -> None:
    """Mode driver would lose it: its hook does not listen, but is there."""
    leave_parked(place, target.pid)
    with (
        pytest.raises(Busy, match="parked, by a job that did not end") as raised,
        discover_group(target.pid, place / "run", lambda tree: None),
    ):
        pytest.fail("it was taken")
    assert f"phos recover {target.pid}" in str(raised.value)
    recover(place, str(target.pid))
    computes_right(target, undisturbed)


def test_the_memory_is_gone_with_its_last_keeper(target: Target, place: Path) -> None:
    """Both phosd and the mover were killed: that is said, and the process is left alone."""
    leave_parked(place, target.pid)
    with Mover.start(
        0, None, Node(NodeConfig(place / "s2", place / "r2")).store.key, place / "run"
    ):
        pass  # it stays, because it keeps something
    kill_movers(place)
    done = phos("recover", f"--runtime-dir={place / 'run'}", str(target.pid))
    assert done.returncode == 1
    assert "nobody holds the memory" in done.stdout and "restore its last image" in done.stdout
    with HookLink(target.pid, place / "run") as link:
        assert link.hello().state is HookState.PARKED


def kill_movers(place: Path) -> None:
    plant = Plant("", place)
    assert plant.movers()
    plant.close()
    wait_until(lambda: not plant.movers(), "the movers to end")


def test_a_job_of_a_running_phosd_is_not_disturbed(target: Target, place: Path) -> None:
    known = process_id(target.pid)
    assert known is not None
    record = JobRecord(7, "checkpoint", str(target.pid), 0, 1.0, boot_id())
    affected = AffectedSet((AffectedProcess(*known, gpu=True, hooked=True),), (0,))
    Journal(place / "run" / "journal").write(record)
    driver_checkpoint.lock(target.pid)
    try:
        with alone(place / "run"):
            assert len(listed(place, target)) == 1
            Journal(place / "run" / "journal").write(replace(record, affected=affected))
            assert listed(place, target) == []
            done = phos("recover", f"--runtime-dir={place / 'run'}", str(target.pid))
            assert done.returncode == 5
            assert "job 7 of a running phosd works on" in done.stdout
    finally:
        driver_checkpoint.unlock(target.pid)


def test_only_root_may(target: Target, place: Path) -> None:
    place.chmod(0o755)
    done = phos("recover", f"--runtime-dir={place / 'run'}", str(target.pid), uid=65534)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "only root" in done.stdout


def test_nobody_of_that_name(place: Path) -> None:
    done = phos("recover", f"--runtime-dir={place / 'run'}", str(2**22))
    assert done.returncode == 4
    assert "there is no process" in done.stdout


def test_the_doctor_finds_them(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_checkpoint.lock(target.pid)
    try:
        found = [json.loads(line) for line in phos("doctor").stdout.splitlines()]
    finally:
        driver_checkpoint.unlock(target.pid)
    (row,) = [row for row in found if f"process {target.pid} is" in row["text"]]
    assert row["level"] == "error" and f"phos recover {target.pid}" in row["mend"]
