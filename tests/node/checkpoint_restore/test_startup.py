"""What is written down before a job touches anything, and cleared up when nobody ended it."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.criu.run.owned_processes import restore_mark
from phosd.engine.job.affected import AffectedProcess, AffectedSet, InterruptedJob, now
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.rescue_client import RescueClient
from phosd.engine.mover.protocol import endpoint
from phosd.engine.node import staging as staging_module
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery import dumps, from_driver, rescue, startup
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.rescue import free
from phosd.engine.recovery.startup import settle
from phosd.engine.system import procfs
from phosd.engine.system.instance_lock import alone, in_use
from phosd.engine.system.native import python_environment
from phosd.engine.system.procfs import process_id
from phosd.errors import Busy, Internal
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computed_right, computes_right, save
from tests.support.harness import SELDOM, Target, alive, children, wait_until
from tests.support.pids import occupy, release
from tests.system.cli.test_recover import leave_parked


@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop", "driver"])
def test_what_is_touched_is_known_before_anything_stops(
    mode: str, node: Node, start: Starter
) -> None:
    """Every process of the group: those that the driver may lock, and their children."""
    target = start("single" if mode == "driver" else "shared_pair")
    target.wait_for_steps(3)
    progress = Progress()
    told: list[tuple[AffectedSet, list[str]]] = []
    progress.recorder = lambda affected: told.append((affected, [p.name for p in progress.phases]))
    checkpoint(node, target.pid, CheckpointOptions(mode=mode), progress)
    ((affected, phases),) = told
    assert phases == ["prepare"] and not affected.image
    group = {target.pid, *children(target.pid)}
    assert {(each.pid, each.start_time) for each in affected.processes} == {*map(process_id, group)}
    assert {each.pid for each in affected.processes if each.gpu and each.hooked} == group
    assert affected.gpus == (0, 1), "it sees both"


def test_a_journal_that_cannot_be_written_ends_the_job_before_the_stop(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    image = save(node, target, "stop").id

    def full(_: AffectedSet) -> None:
        raise Internal("the journal is full")

    progress = Progress(recorder=full)
    with pytest.raises(Internal, match="journal is full"):
        checkpoint(node, target.pid, CheckpointOptions(mode="stop"), progress)
    assert progress.stop_seconds == 0
    computes_right(target, undisturbed)
    target.kill()
    with pytest.raises(Internal, match="journal is full"):
        restore(node, image, RestoreOptions(), Progress(recorder=full))
    assert not alive(target.pid)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(staging_module, "MEMORY", tmp_path)
    yield tmp_path


def test_staging_of_the_dead_is_removed_and_that_of_the_living_stays(
    node: Node, memory: Path
) -> None:
    (memory / "phosd-left").mkdir()
    (memory / "phosd-left" / "pages").write_bytes(b"x")
    (memory / "phosd-strangers").mkdir()
    os.chown(memory / "phosd-strangers", 1000, 1000)
    (memory / "elsewhere").mkdir()
    (memory / "phosd-link").symlink_to(memory / "elsewhere")
    (memory / "phosd-file").touch()
    with node.staging.folder(4096) as used:
        assert used is not None
        settle(node, [])
        kept = {"phosd-strangers", "elsewhere", "phosd-link", "phosd-file", used.name}
        assert {path.name for path in memory.iterdir()} == kept


def test_what_a_user_has_nested_ends_neither_a_job_nor_the_start(node: Node, memory: Path) -> None:
    """A rehearsal's files are in a folder that is its user's for a moment."""

    def nest(folder: Path) -> None:
        at = os.open(folder, os.O_RDONLY)
        for _ in range(1500):  # deeper than Python recurses
            os.mkdir("d", dir_fd=at)
            below = os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)

    with node.staging.folder(0) as used:
        assert used is not None
        nest(used)
    assert not used.exists()
    left = memory / "phosd-left"
    left.mkdir()
    nest(left)
    assert settle(node, []) == {}
    assert not left.exists()


def test_a_folder_that_is_just_removed_is_nobody_elses(
    node: Node, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def remove_beside_another_engine(folder: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        node.staging.sweep()
        remove(folder)

    with node.staging.folder(4096) as used:
        assert used is not None
        monkeypatch.setattr(shutil, "rmtree", remove_beside_another_engine)
    assert list(memory.iterdir()) == []


def test_sockets_of_the_dead_and_stale_calls_are_removed(node: Node) -> None:
    """A call to wake that stays would wake a hook in the middle of a dump."""
    folder = node.config.runtime_dir / "hook"
    gone = 2**22 + 1
    for pid in (gone, os.getpid()):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / f"{pid}.sock"))
        (folder / f"{pid}.wake").touch()
    (folder / f"{gone + 1}.sock").mkdir()
    (folder / "words.sock").touch()
    settle(node, [])
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f"{os.getpid()}.sock", f"{gone + 1}.sock", "words.sock"]
    )


def test_a_restored_process_that_waits_is_ended_and_another_is_not(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Only what the job can have made: its pid, its program, begun since."""
    target = start("single")
    target.wait_for_steps(3)
    image = save(node, target, "stop").id
    touched = (AffectedProcess(target.pid, None, gpu=True, hooked=True),)
    affected = AffectedSet(touched, (0,), image, now())
    said = settle(node, [InterruptedJob(1, affected)])
    assert said == {1: "nothing had been restored; start the job again"}, "it is older than the job"
    computes_right(target, undisturbed)
    target.kill()
    other = occupy(target.pid)  # somebody else's, in the same second
    try:
        assert settle(node, [InterruptedJob(1, affected)]) == {
            1: "nothing had been restored; start the job again"
        }
        assert alive(other)
    finally:
        release(other)
    since = restore_and_be_killed(node, target, image)
    said = settle(node, [InterruptedJob(1, AffectedSet(touched, (0,), image, since))])
    assert said == {1: f"what was restored of it (pid {target.pid}) was ended; start the job again"}
    wait_until(lambda: not alive(target.pid), "its end")
    files = [p for p in (node.store.disk.images / image).rglob("*") if p.is_file()]
    assert {p.stat().st_mode & 0o777 for p in files} == {0o600}
    restore(node, image, RestoreOptions(), Progress())
    computes_right(target, undisturbed)


def restore_and_be_killed(node: Node, target: Target, image: str) -> int:
    """A restore whose phosd is killed before the program goes on; when it began."""
    since = now()
    script = f"""
import os, pathlib
from phosd.engine import faults
from phosd.engine.node import machine
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
from phosd.engine.operations.restore.restore import RestoreOptions, restore
place = pathlib.Path({str(node.config.runtime_dir.parent)!r})
machine._require_runtime_dir = lambda *_: None  # it is killed before it needs the hooks
node = Node(NodeConfig(place / "state", place / "other"))
restore(node, {image!r}, RestoreOptions(), Progress())
"""
    environment = os.environ | {"PHOS_FAULT": "restore-map:kill"}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == -9
    assert alive(target.pid)
    return since


def test_a_restored_process_that_criu_never_let_go_of_is_ended(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver waits for its answer for ever."""
    target = start("single")
    target.wait_for_steps(3)
    image = save(node, target, "driver").id
    target.kill()
    since = restore_and_be_killed(node, target, image)

    def asked(pid: int) -> driver_checkpoint.State:
        wait_until(lambda: not alive(pid), "its end")
        return driver_checkpoint.State.RUNNING

    monkeypatch.setattr(startup, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(driver_checkpoint, "state", asked)
    concern = AffectedSet(
        (AffectedProcess(target.pid, None, gpu=True, hooked=False),), (0,), image, since
    )
    said = settle(node, [InterruptedJob(1, concern)])
    assert said == {1: f"what was restored of it (pid {target.pid}) was ended; start the job again"}
    assert not alive(target.pid)


def test_what_a_killed_criu_leaves_standing_is_ended(node: Node, start: Starter) -> None:
    """CRIU stops children of its own while it looks what the kernel can do. Killed just then, with
    its phosd, it leaves one that nobody lets go on.
    """
    target = start("single")
    target.wait_for_steps(3)
    image = save(node, target, "stop").id
    target.kill()
    stopped = ["/bin/sh", "-c", "kill -STOP $$"]
    before = subprocess.Popen(stopped, env=restore_mark(str(target.pid)))
    wait_until(lambda: stands(before.pid), "it to stop")
    time.sleep(0.02)  # the start of a process is known in hundredths of a second
    concern = AffectedSet(
        (AffectedProcess(target.pid, None, gpu=True, hooked=True),), (0,), image, now()
    )
    left = {
        "ours": subprocess.Popen(stopped, env=restore_mark(str(target.pid))),
        "ours, leading a session": subprocess.Popen(
            stopped, env=restore_mark(str(target.pid)), start_new_session=True
        ),
        "of another restore": subprocess.Popen(stopped, env=restore_mark(str(target.pid + 1))),
        "no CRIU": subprocess.Popen(stopped),
    }
    everything = [before, *left.values()]
    try:
        for each in left.values():
            wait_until(lambda pid=each.pid: stands(pid), "it to stop")  # type: ignore[misc]
        began = time.monotonic()
        done = settle(node, [InterruptedJob(1, concern)])
        assert done == {1: "nothing had been restored; start the job again"}
        assert time.monotonic() - began < 5
        living = {name for name, each in left.items() if each.poll() is None}
        assert living == {"of another restore", "no CRIU"}
        assert before.poll() is None
    finally:
        for each in everything:
            each.kill()
            each.wait()


def stands(pid: int) -> bool:
    """Whether a process is stopped."""
    found = procfs.stat(pid)
    return found is not None and found.stopped


def test_criu_is_waited_for(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """phosd is killed at several instants of a dump: CRIU lets go of the tree before we begin."""
    target = start("workers", extra=SELDOM)
    target.wait_for_steps(3)
    known = process_id(target.pid)
    assert known is not None
    after_criu = from_driver.back_from_driver

    def begin(*arguments: Any) -> None:
        assert not dumps.roots_of_dumps() & {target.pid}
        assert procfs.status(target.pid).tracer == 0
        after_criu(*arguments)

    monkeypatch.setattr(rescue, "back_from_driver", begin)
    place = node.config.runtime_dir.parent
    script = f"""
import pathlib, sys
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
def tell(progress):
    print(progress.phases[-1].name, flush=True)
place = pathlib.Path({str(place)!r})
node = Node(NodeConfig(place / "state", place / "run"))
checkpoint(node, {target.pid}, CheckpointOptions(mode="stop"), Progress(observer=tell))
"""
    for delay in (0.0, 0.02, 0.05, 0.1):
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            for line in engine.stdout:
                if line.strip() == "cpu":
                    time.sleep(delay)
                    engine.send_signal(signal.SIGKILL)
                    break
        touched = AffectedProcess(*known, gpu=True, hooked=True)
        (text,) = settle(node, [InterruptedJob(1, AffectedSet((touched,), (0,)))]).values()
        assert "could not be brought back" not in text, text
        target.more_steps(2)
    computed_right(target, undisturbed)
    save(node, target, "stop")


@pytest.mark.parametrize("refuses", [False, True], ids=["unused", "refuses"])
def test_one_mover_keeps_nobody_else_from_coming_back(
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    place: Path,
    refuses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that no phosd had come to use yet, or that fails at everything it is asked."""
    asleep, target = start("single"), start("right", arguments=("0", "by_value"))
    for each in (asleep, target):
        each.wait_for_steps(3)
    suspend(node, asleep.pid, SuspendOptions(), Progress())
    node.close()
    leave_parked(place, target.pid)
    words = ["-m", "phosd.engine.mover", "--gpu=1", "--ring=33554432"]
    words.append(f"--runtime-dir={node.config.runtime_dir}")
    ask = RescueClient._ask

    def failing(client: RescueClient, *question: Any) -> Any:
        if refuses and client.gpu == 1:
            raise Internal("the data mover refused")
        return ask(client, *question)

    monkeypatch.setattr(RescueClient, "_ask", failing)
    with subprocess.Popen([sys.executable, *words], env=python_environment()) as unused:
        wait_until(lambda: len(endpoint.sockets(node.config.runtime_dir)) == 2, "the mover")
        settle(node, [])
        target.more_steps(2)
        unused.kill()
    resume(node, asleep.pid, ResumeOptions(), Progress())
    computes_right(asleep, undisturbed)


def test_room_for_a_program_that_runs_is_given_back(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """A migration that was killed before the driver's part has reserved it already."""
    target = start("single")
    target.wait_for_steps(3)
    known = process_id(target.pid)
    assert known is not None
    mover = node.movers.mover(1)
    mover.reserve(32 << 20, [known])
    node.close()
    wait_until(lambda: left_parked(node.config.runtime_dir) == {known}, "the session to be over")
    settle(node, [])
    assert left_parked(node.config.runtime_dir) == set()
    computes_right(target, undisturbed)


def test_one_engine_a_folder(tmp_path: Path) -> None:
    with alone(tmp_path):
        assert in_use(tmp_path)
        with pytest.raises(Busy, match=f"another phosd runs with {tmp_path}"), alone(tmp_path):
            pytest.fail("two of them")
    assert not in_use(tmp_path) and not in_use(tmp_path / "none")


def test_a_folder_held_by_somebody_who_may_look_into_it(tmp_path: Path) -> None:
    """The runtime folder is open to all."""
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with alone(tmp_path):
            assert (tmp_path / "phosd.lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.close(descriptor)


def test_nobody_waits_for_a_process_that_tells_nothing(
    place: Path, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, target = start("features"), start("single")
    for each in (silent, target):
        each.wait_for_steps(3)
        leave_parked(place, each.pid)
    wanted = {known for each in (silent, target) if (known := process_id(each.pid)) is not None}
    asked, go = driver_checkpoint.state, threading.Event()

    def tell(pid: int) -> driver_checkpoint.State | None:
        if pid == silent.pid:
            go.wait(60)
        return asked(pid)

    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "state", tell)
        patch.setattr(driver_checkpoint, "TELLING_SECONDS", 5.0)
        account = free(wanted, place / "run")
        go.set()
    assert "does not let itself be looked at" in account.text([silent.pid])
    computes_right(target, undisturbed)
    assert "given back its parked memory" in free(wanted, place / "run").text([silent.pid])
    computes_right(silent, undisturbed)


def test_a_suspended_program_of_which_the_driver_tells_nothing_rests(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the driver does not mean that it was being resumed."""
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    asked: list[int] = []

    def tell(pid: int) -> driver_checkpoint.State | None:
        asked.append(pid)
        known = driver_checkpoint.State
        return known.UNKNOWN if len(asked) == 1 else known.CHECKPOINTED

    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "state", tell)
        settle(node, [])
    assert asked, "it was asked"
    assert driver_checkpoint.state(target.pid) is driver_checkpoint.State.CHECKPOINTED
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


def test_memory_is_kept_for_a_process_of_which_the_driver_tells_nothing(
    place: Path, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    leave_parked(place, target.pid)
    known = process_id(target.pid)
    assert known is not None
    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "state", lambda pid: None)
        text = free({known}, place / "run").text([target.pid])
    assert "the driver does not tell the state of process" in text
    assert left_parked(place / "run") == {known}
    assert "given back its parked memory" in free({known}, place / "run").text([target.pid])
    computes_right(target, undisturbed)
