"""Migrate, suspend, resume and swap over the bus: options, rights, what is told and remembered."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phosd.bus import NAME, Connection, Signal
from phosd.engine.hook_client.link import BlockFlag, HookBlock
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.program.process import GpuProcess
from phosd.errors import OutOfMemory
from phosd.service.api import moves
from phosd.service.api.inventory import Inventory
from phosd.service.jobs.options import MigrateRequest, ResumeRequest, SuspendRequest
from phosd.service.process_identity import identify
from tests.support.authority import NO, YES, authority
from tests.support.bus import busctl
from tests.support.fake_engine import GPU, this_process
from tests.support.harness import running, wait_until
from tests.support.service import MANAGER, ROOT, Service
from tests.system.service.test_jobs import state_of, wait_for
from tests.system.service.test_periodic import OFTEN, left_out_before, node, until
from tests.system.service.test_queries import listed

OWNER = pwd.getpwnam("daemon").pw_uid
STRANGER = pwd.getpwnam("nobody").pw_uid
ME = os.getpid()
GIB = 1 << 30
MIGRATE = ("Migrate", "usa{sv}", ME, "1", 0)


@pytest.fixture
def theirs() -> Iterator[int]:
    """A process of a user."""
    with subprocess.Popen(["sleep", "1000"], user=OWNER, group=OWNER, extra_groups=[]) as process:
        yield process.pid
        process.kill()


def seen(pid: int, **changes: object) -> GpuProcess:
    """A process as the engine lists it."""
    found = identify(pid)
    return this_process(pid=pid, start_time=found.start_time, uid=found.uid, **changes)


def process_of(service: Service, pid: int) -> str:
    return service.call("GetProcess", "u", pid).split('"')[1]


def test_a_migration_from_its_first_phase_to_the_history(service: Service) -> None:
    service.engine.running = [seen(ME)]
    job = service.start(
        "Migrate", "usa{sv}", ME, "0:1", 2, "deadline", "d", 3.5, "mode", "s", "precopy"
    )
    wait_until(lambda: service.get(job, "Job1", "Phase") == '"quiesce"', "the stop")
    assert service.get(job, "Job1", "ProgramStopped") == "true"
    assert service.get(job, "Job1", "Operation") == '"migrate"'
    assert service.get(job, "Job1", "Target") == f'"{ME}"'
    assert service.get(job, "Job1", "Destination") == '"0:1"'
    (entry,) = (service.config.runtime_dir / "journal").glob("*.json")
    written = json.loads(entry.read_text())
    assert (written["operation"], written["pid"]) == ("migrate", ME)
    service.engine.go.set()
    wait_for(service, job, "done")
    assert service.get(job, "Job1", "Result") == '"0:1"'
    assert service.engine.moves == [
        ("migrate", ME, "0:1", MigrateRequest(deadline=3.5, mode="precopy"), 0)
    ]
    wait_until(lambda: not entry.exists(), "the journal to be empty")
    (row,) = listed(service, "ListHistory", "operation", "s", "migrate", "pid", "u", ME)
    assert (row["state"], row["destination"], row["result"]) == ("done", "0:1", "0:1")
    events = [e["text"] for e in listed(service, "ListEvents") if e["kind"] == "job"]
    assert events == [f"migrate of {ME}: done: GPU 0 to GPU 1"]


@pytest.mark.parametrize(("asked", "where"), [("auto", "memory"), ("disk", "disk")])
def test_suspended_and_resumed(service: Service, asked: str, where: str) -> None:
    service.engine.running = [seen(ME)]
    path = process_of(service, ME)
    service.engine.go.set()
    job = service.start("Suspend", "ua{sv}", ME, 1, "where", "s", asked)
    wait_until(lambda: service.get(path, "Process1", "State") == '"suspended"', "its state")
    wait_for(service, job, "done")  # a look at the processes may have told their state before
    assert service.get(job, "Job1", "Mode") == service.get(job, "Job1", "Result") == f'"{where}"'
    job = service.start("Resume", "ua{sv}", ME, 1, "gpu", "s", "1")
    wait_until(lambda: service.get(path, "Process1", "State") == '"running"', "its state")
    wait_for(service, job, "done")
    assert service.get(job, "Job1", "Destination") == '"1"'
    assert service.get(job, "Job1", "Result") == '"0:1"'
    assert service.engine.moves == [
        ("suspend", ME, SuspendRequest(where=asked), 0),
        ("resume", ME, ResumeRequest(gpu="1"), 0),
    ]


def test_what_became_of_a_process_is_told_before_the_end_of_the_job(service: Service) -> None:
    service.engine.running = [seen(ME)]
    path = process_of(service, ME)
    service.engine.go.set()
    heard: list[tuple[str, object]] = []
    ended = asyncio.Event()

    def hear(signal: Signal) -> None:
        if signal.member == "JobRemoved":
            heard.append(("end", signal.args[1]))
            ended.set()
        elif signal.member == "PropertiesChanged" and signal.path == path:
            heard.append(("state", signal.args[1].get("State")))

    async def body() -> None:
        connection = await Connection.open(service.address)
        await connection.subscribe(hear, "sender='org.phos'")
        await asyncio.to_thread(service.start, "Suspend", "ua{sv}", ME, 0)
        await asyncio.wait_for(ended.wait(), 60)
        connection.close()

    asyncio.run(body())
    assert heard == [("state", "suspended"), ("end", "done")]


def test_a_process_below_one_that_a_job_holds_is_left_alone(service: Service) -> None:
    service.start("Checkpoint", "ua{sv}", ME, 0)
    with running(["sleep", "1000"]) as child:
        for call in (
            ("Migrate", "usa{sv}", child.pid, "1", 0),
            ("Swap", "uua{sv}", 1, child.pid, 0),
        ):
            with pytest.raises(RuntimeError, match=rf"job 1 \(checkpoint {ME}\) holds process"):
                service.call(*call)
        child.kill()
    assert service.engine.moves == []


def test_a_swap_is_a_job_of_both(service: Service, theirs: int) -> None:
    service.engine.running = [seen(ME), seen(theirs, state="suspended")]
    paths = [process_of(service, pid) for pid in (ME, theirs)]
    job = service.start("Swap", "uua{sv}", ME, theirs, 0)
    assert service.get(job, "Job1", "Target") == f'"{ME} {theirs}"'
    for pid in (ME, theirs):
        with pytest.raises(RuntimeError, match=rf"job 1 \(swap {ME} {theirs}\) holds process"):
            service.call("Suspend", "ua{sv}", pid, 0)
    service.engine.go.set()
    wait_for(service, job, "done")
    assert service.get(job, "Job1", "Result") == f'"{theirs}"'
    assert service.engine.moves == [("swap", ME, theirs, SuspendRequest(), 0)]
    wait_until(
        lambda: (
            [service.get(path, "Process1", "State") for path in paths]
            == ['"suspended"', '"running"']
        ),
        "the states of both",
    )
    for pid in (ME, theirs):
        (row,) = listed(service, "ListHistory", "pid", "u", pid)
        assert row["operation"] == "swap"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("Migrate", "usa{sv}", 2**22 + 1, "1", 0), "there is no process"),
        (("Migrate", "usa{sv}", ME, "", 0), "'' is no destination; name a GPU"),
        (("Migrate", "usa{sv}", ME, "\x1b[31m", 0), "is no destination"),
        (("Migrate", "usa{sv}", ME, "0" * 2049, 0), "is no destination"),
        (("Resume", "ua{sv}", ME, 1, "gpu", "s", "[b]1"), "'[b]1' is no destination"),
        (("Migrate", "usa{sv}", ME, "1", 1, "where", "s", "disk"), "no option `where`"),
        (("Migrate", "usa{sv}", ME, "1", 1, "deadline", "d", 0), "deadline"),
        (
            ("Migrate", "usa{sv}", ME, "1", 1, "mode", "s", "stop"),
            "'stop' is no mode; mode is one of: auto, ",
        ),
        (("Suspend", "ua{sv}", 2**22 + 1, 0), "there is no process"),
        (
            ("Suspend", "ua{sv}", ME, 1, "where", "s", "tape"),
            "'tape' is no where; where is one of: ",
        ),
        (("Suspend", "ua{sv}", ME, 1, "gpu", "s", "1"), "no option `gpu`"),
        (("Resume", "ua{sv}", ME, 1, "deadline", "d", 3), "no option `deadline`"),
        (("Resume", "ua{sv}", ME, 1, "gpu", "u", 1), "gpu has to be text, not 1"),
        (("Swap", "uua{sv}", ME, ME, 0), "cannot take its own place"),
        (("Swap", "uua{sv}", ME, 2**22 + 1, 0), "there is no process"),
        (("PlanEvacuation", "sa{sv}", "9", 0), "'9' names no GPU of this node; name a GPU"),
        (("PlanEvacuation", "sa{sv}", "", 0), "'' names no GPU of this node"),
        (
            ("PlanEvacuation", "sa{sv}", "0", 1, "dry", "b", "true"),
            "options of this call are: none",
        ),
    ],
)
def test_calls_that_make_no_sense(service: Service, call: tuple[str, ...], error: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        service.call(*call)
    assert error in str(caught.value)
    assert service.engine.moves == []
    assert service.call("ListJobs") == "a(ussso) 0"


def test_what_the_engine_says_ends_the_job(service: Service) -> None:
    service.engine.trouble = OutOfMemory("GPU 1 has 1 GiB free", hint="choose another")
    service.engine.go.set()
    job = service.start("Migrate", "usa{sv}", ME, "1", 0)
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Error") == '"OutOfMemory"'
    assert service.get(job, "Job1", "Message") == '"GPU 1 has 1 GiB free; choose another"'


def test_a_move_is_cancelled(service: Service) -> None:
    job = service.start("Suspend", "ua{sv}", ME, 0)
    wait_until(lambda: service.engine.moves, "the engine to begin")
    busctl(service.address, "call", NAME, job, "org.phos.Job1", "Cancel", "a{sv}", "0")
    wait_for(service, job, "cancelled")


def test_moves_wait_for_each_other_if_asked_to(service: Service) -> None:
    first = service.start("Checkpoint", "ua{sv}", ME, 0)
    waiting = [
        service.start("Migrate", "usa{sv}", ME, "1", 1, "queue", "b", "true"),
        service.start("Suspend", "ua{sv}", ME, 1, "queue", "b", "true"),
        service.start("Resume", "ua{sv}", ME, 1, "queue", "b", "true"),
    ]
    assert [state_of(service, job) for job in waiting] == ["queued"] * 3
    service.engine.go.set()
    for job in (first, *waiting):
        wait_for(service, job, "done")
    assert [move[0] for move in service.engine.moves] == ["migrate", "suspend", "resume"]


@pytest.mark.parametrize(
    ("before", "thawed"), [(("Resume", "ua{sv}", ME, 0), True), (MIGRATE, False)]
)
def test_a_step_is_kept_thawed_while_its_suspension_waits_for_a_resumption(
    service: Service, monkeypatch: pytest.MonkeyPatch, before: tuple[Any, ...], thawed: bool
) -> None:
    """Not while it waits for anything else, which its user might draw out."""
    told: list[str] = []

    @contextlib.contextmanager
    def kept_thawed(pid: int) -> Iterator[None]:
        told.append(f"{pid} thawed")
        yield
        told.append("over")

    monkeypatch.setattr(moves, "kept_thawed", kept_thawed)
    service.start(*before)
    job = service.start("Suspend", "ua{sv}", ME, 2, "queue", "b", "true", "thaw", "b", "true")
    assert told == [f"{ME} thawed"] * thawed
    service.engine.go.set()
    wait_for(service, job, "done")
    assert told == [f"{ME} thawed", "over"] * thawed


def test_one_that_ended_while_its_job_waited_is_not_touched(service: Service) -> None:
    with running(["sleep", "1000"]) as process:
        service.start("Checkpoint", "ua{sv}", process.pid, 0)
        job = service.start("Suspend", "ua{sv}", process.pid, 1, "queue", "b", "true")
        process.kill()
    wait_until(lambda: not Path(f"/proc/{process.pid}").exists(), "its end")
    service.engine.go.set()
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Error") == '"NoSuchProcess"'
    assert service.engine.moves == []


def test_a_token_is_of_one_move(service: Service) -> None:
    asked = ("Migrate", "usa{sv}", ME, "1", 1, "token", "s", "t")
    job = service.start(*asked)
    assert service.start(*asked) == job
    with pytest.raises(RuntimeError, match="the token 't' belongs to job 1"):
        service.call("Suspend", "ua{sv}", ME, 1, "token", "s", "t")


def test_whose_rights_count(service: Service, bus: str, theirs: int) -> None:
    """The owner's own; root's for root, and for whom polkit lets do it with what is others'."""
    service.engine.go.set()
    with authority(bus, NO) as polkit:
        polkit.verdicts |= {"org.phos.migrate": YES, "org.phos.migrate-others": YES}
        for number, (uid, acting) in enumerate(((OWNER, OWNER), (0, 0), (STRANGER, 0)), 1):
            job = service.start("Suspend", "ua{sv}", theirs, 0, uid=uid)
            wait_for(service, job, "done")
            assert service.get(job, "Job1", "Owner") == str(uid)
            assert service.engine.moves[-1] == ("suspend", theirs, SuspendRequest(), acting)
            assert len(service.engine.moves) == number


def test_root_rights_for_one_are_none_for_the_other(
    service: Service, bus: str, theirs: int
) -> None:
    service.engine.go.set()
    with (
        subprocess.Popen(["sleep", "1000"], user=STRANGER, group=STRANGER, extra_groups=[]) as mine,
        authority(bus, YES),
    ):
        job = service.start("Swap", "uua{sv}", mine.pid, theirs, 0, uid=STRANGER)
        wait_for(service, job, "done")
        mine.kill()
    assert service.engine.moves[-1][-1] == STRANGER


@pytest.mark.parametrize("order", ["own first", "others' first"])
def test_a_swap_needs_the_right_to_both(service: Service, theirs: int, order: str) -> None:
    with running(["sleep", "1000"], user=STRANGER, group=STRANGER, extra_groups=[]) as mine:
        pair = (mine.pid, theirs) if order == "own first" else (theirs, mine.pid)
        with pytest.raises(RuntimeError, match=f"process {theirs} belongs to uid {OWNER}"):
            service.call("Swap", "uua{sv}", *pair, 0, uid=STRANGER)
        mine.kill()
    assert service.engine.moves == []


def test_a_suspended_process_is_not_saved_by_its_schedule(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as found:
            await found.table.wait(found.every(OFTEN))
            asked: list[int] = []

            def suspended(_: object) -> bool:
                asked.append(found.engine.made)
                return len(asked) <= 5

            found.suspended = suspended
            await until(lambda: found.engine.made > max(asked, default=1 << 30), "the next one")
            assert len(set(asked[:5])) == 1, "none was made meanwhile"
            await until(lambda: any(job.progress.notes for job in found.jobs), "the note")
            told = next(job for job in found.jobs if job.progress.notes)
            count = left_out_before(told)
            assert told.progress.notes == [f"{count} periodic checkpoints before it left out"]
            # More than the five when the machine is slow, but none twice.
            assert count >= 5
            assert OFTEN * (count + 1) <= told.started - found.jobs[0].started + 0.02
            assert not found.schedule or not found.schedule.ended

    asyncio.run(body())


def test_a_process_below_counts_as_part_of_its_tree() -> None:
    """A schedule is of the root, and what was suspended may be a child of it."""
    with running(["sleep", "1000"]) as child:
        processes = {"a": seen(ME), "b": seen(child.pid, state="suspended")}
        inventory: Any = SimpleNamespace(processes=processes)
        assert [Inventory.suspended(inventory, pid) for pid in (child.pid, ME)] == [True, True]
        processes["b"] = seen(child.pid)
        assert not Inventory.suspended(inventory, ME)
        child.kill()


# Evacuation


OTHER = GpuInfo(1, "GPU-5678-cd", GPU.name, 1 << 34, 1 << 33)
THIRD = dataclasses.replace(OTHER, ordinal=2, uuid="GPU-5699-ef", memory_used=1 << 32)


def planned(service: Service, gpu: str = "0", uid: int = 0) -> list[list[object]]:
    words = (NAME, ROOT, MANAGER, "PlanEvacuation", "sa{sv}", gpu, "0")
    reply = busctl(service.address, "--json=short", "call", *words, uid=uid or None)
    (rows,) = json.loads(reply)["data"]
    return list(rows)


def test_who_has_just_left_a_gpu_is_not_in_its_plan(service: Service) -> None:
    """The GPU lists its processes every two seconds, and when a job has moved one."""
    service.engine.devices = [dataclasses.replace(GPU, pids=(ME,)), OTHER]
    service.engine.running = [seen(ME, gpus=(0,))]
    wait_until(lambda: OTHER.uuid in service.call("ListGPUs"), "the GPUs")
    assert [row[0] for row in planned(service)] == [ME]

    def leave(_: object) -> None:
        service.engine.devices = [GPU, dataclasses.replace(OTHER, pids=(ME,))]

    service.engine.act = leave
    service.engine.go.set()
    wait_for(service, service.start("Migrate", "usa{sv}", ME, "1", 0), "done")
    assert planned(service) == []
    assert [row[0] for row in planned(service, "1")] == [ME]


def test_the_plan_of_an_evacuation(service: Service, theirs: int) -> None:
    service.engine.devices = [dataclasses.replace(GPU, pids=(3, 4)), OTHER, THIRD]
    service.engine.running = [
        seen(ME, device_bytes=GIB, gpus=(0,)),
        this_process(pid=2, device_bytes=13 * GIB),
        this_process(pid=3, hook_state="driver", reason="no hook", device_bytes=0, gpus=()),
        this_process(pid=4, gpus=(1,)),
        this_process(pid=5, state="suspended"),
        seen(theirs, device_bytes=12 * GIB),
    ]
    wait_until(lambda: '"GPU-5699-ef"' in service.call("ListGPUs"), "the GPUs")
    command = "python train.py"
    assert planned(service) == [
        [2, "suspend", 13 * GIB, "", "no other GPU of this chip has room for it", command],
        [theirs, "migrate", 12 * GIB, "0:2", "GPU 2 has most memory free", command],
        [ME, "migrate", GIB, "0:1", "GPU 1 has most memory free", command],
        [3, "stay", 0, "", "no hook", command],
        [4, "migrate", 0, "0:2", "GPU 2 has most memory free", command],
    ]
    assert [row[0] for row in planned(service, "GPU-12", uid=OWNER)] == [theirs]
    assert planned(service, uid=STRANGER) == []
    assert [row[0] for row in planned(service, "1")] == [4]
    service.engine.in_pieces = {2}
    assert [row[1] for row in planned(service)] == [
        *("suspend", "suspend", "migrate", "stay", "suspend")
    ]
    with pytest.raises(RuntimeError, match="'GPU-56' names several GPUs"):
        planned(service, "GPU-56")
    assert service.engine.moves == []


def test_without_nvml_what_hooks_tell_is_what_is_used(service: Service) -> None:
    """And of several GPUs what is on this one; who does not answer counts in full."""
    service.engine.devices = [GpuInfo(n, f"GPU-{n}000-ab", "soft", 4 * GIB) for n in range(3)]
    service.engine.running = [
        this_process(pid=2, device_bytes=6 * GIB, gpus=(0, 1)),
        this_process(pid=3, device_bytes=2 * GIB, gpus=(2,)),
    ]
    service.engine.live_blocks = [
        (HookBlock(id=1, va=0, size=GIB, device=0, flags=BlockFlag(0)), 0),
        (HookBlock(id=2, va=GIB, size=5 * GIB, device=1, flags=BlockFlag(0)), 1),
    ]
    wait_until(lambda: '"GPU-2000-ab"' in service.call("ListGPUs"), "the GPUs")
    told = [row[:4] for row in planned(service)]
    assert told == [[2, "migrate", GIB, "0:2"]]
    service.engine.silent = OutOfMemory("busy")
    told = [row[:4] for row in planned(service)]
    assert told == [[2, "suspend", 6 * GIB, ""]]
