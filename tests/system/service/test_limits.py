"""How many jobs run at once, who is next, and what the others see of it."""

import asyncio
import os
import pwd
import re
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec
import pytest

from phosd.engine.image.usage import total_bytes
from phosd.engine.job.progress import Progress
from phosd.engine.program.away import Away
from phosd.engine.system.procfs import process_id
from phosd.errors import Busy
from phosd.service.jobs.limits import JobLimits, UserLimits, in_turn
from phosd.service.jobs.table import WAITING, Job, JobState, JobTable, Outcome, Task
from phosd.service.process_identity import identify
from tests.support.fake_engine import block, manifest, this_process
from tests.support.service import Service
from tests.system.cli.test_lists import as_nobody
from tests.system.service.test_jobs import wait_for
from tests.unit.service.test_job_table import Witness, accept

STRANGER = pwd.getpwnam("nobody").pw_uid


@pytest.mark.parametrize(
    ("gpus", "running", "room"),
    [
        ((), [(0,), (0,)], True),
        ((), [(0,), (0,), (1,)], False),
        ((0,), [(0,), (1,)], True),
        ((0,), [(0,), (0, 1)], False),
        ((1,), [(0,), (0, 1)], True),
        ((0, 1), [(1,), (1,)], False),
    ],
)
def test_room_for_one_more(
    gpus: Sequence[int], running: Sequence[Sequence[int]], room: bool
) -> None:
    assert JobLimits(jobs=3, per_gpu=2).have_room(gpus, running) is room


def test_nobody_takes_all_places() -> None:
    """A user with a job leaves a quarter to those who have none; a user decides how long a job
    takes.
    """
    limits = JobLimits(jobs=8, per_gpu=4)
    six = [(n,) for n in range(6)]
    assert limits.have_room((7,), six[:5], six[:5])
    assert not limits.have_room((7,), six, six[:1])
    assert limits.have_room((7,), six, ())
    assert limits.have_room((7,), [*six, (6,)], ())
    assert not limits.have_room((7,), [*six, (6,), (7,)], ())
    three = [(0,), (0,), (0, 1)]
    assert not limits.have_room((0,), three, three[:1])
    assert limits.have_room((1,), three, three[:1])
    assert limits.have_room((0,), three, ())


def test_the_user_with_the_fewest_jobs_is_next_with_the_oldest() -> None:
    waiting = [(1, 7), (2, 7), (3, 7), (4, 8), (5, 9), (6, 8)]
    assert in_turn(waiting, []) == [1, 4, 5, 2, 6, 3]
    assert in_turn(waiting, [8, 8, 9]) == [1, 2, 5, 3, 4, 6]
    assert in_turn(reversed(waiting), []) == [1, 4, 5, 2, 6, 3]
    assert in_turn([], [7]) == []


class Work:
    """Jobs that last until they are told to end."""

    def __init__(self) -> None:
        self._go: dict[str, threading.Event] = {}

    def task(self, name: str, *gpus: int, owner: int = 0, short: bool = False) -> Task:
        go = self._go[name] = threading.Event()

        def work(progress: Progress) -> Outcome:
            while not go.wait(0.005):
                progress.check()
            return Outcome(name)

        claims = frozenset((f"process {name}",))
        return Task("checkpoint", name, owner, claims, work, gpus=frozenset(gpus), short=short)

    async def end(self, table: JobTable, job: Job) -> None:
        self._go[job.task.target].set()
        await table.wait(job)


def states(jobs: Sequence[Job]) -> list[int]:
    """The position of each job; 0 for one that runs."""
    assert all((job.state is JobState.QUEUED) == (job.position > 0) for job in jobs)
    return [job.position for job in jobs]


def test_jobs_beyond_the_limit_wait_and_know_their_places() -> None:
    async def run() -> None:
        work, witness = Work(), Witness()
        table = JobTable(witness.listener(), limits=JobLimits(jobs=2))
        owners = {"a": 7, "b": 7, "c": 7, "d": 7, "e": 8}
        jobs = [table.submit(work.task(n, owner=u), accept) for n, u in owners.items()]
        assert states(jobs) == [0, 0, 2, 3, 1]
        assert table.waiting == 3
        deletion = table.submit(work.task("f", owner=7, short=True), accept)
        assert deletion.state is JobState.RUNNING
        await work.end(table, jobs[0])
        assert states(jobs[1:]) == [0, 1, 2, 0]
        table.cancel(jobs[2])
        assert states(jobs[3:]) == [1, 0]
        table.set_limits(JobLimits(jobs=3))
        assert states(jobs[3:]) == [0, 0]
        for job in (jobs[1], jobs[3], jobs[4], deletion):
            await work.end(table, job)
        assert table.waiting == 0
        begun = [number for what, number in witness.heard if what == "moved"]
        assert begun == [jobs[4].number, jobs[3].number]
        # Each notification came, although nothing but its place had changed for the job.
        await asyncio.sleep(0.6)
        assert ("progressed", jobs[3].number) in witness.heard
        await table.close()

    asyncio.run(run())


def test_a_job_for_several_gpus_is_not_overtaken_on_any_of_them() -> None:
    async def run() -> None:
        work = Work()
        table = JobTable(Witness().listener(), limits=JobLimits(jobs=9, per_gpu=1))
        one = table.submit(work.task("one", 0), accept)
        both = table.submit(work.task("both", 0, 1), accept)
        later = table.submit(work.task("later", 1), accept)
        other = table.submit(work.task("other", 2), accept)
        assert states([one, both, later, other]) == [0, 1, 2, 0]
        await work.end(table, one)
        assert states([both, later]) == [0, 1]
        await work.end(table, both)
        assert states([later]) == [0]
        await work.end(table, later)
        await work.end(table, other)
        await table.close()

    asyncio.run(run())


def test_a_cancelled_job_keeps_no_gpu_for_itself() -> None:
    async def run() -> None:
        work = Work()
        table = JobTable(Witness().listener(), limits=JobLimits(jobs=9, per_gpu=1))
        one = table.submit(work.task("one", 0), accept)
        both = table.submit(work.task("both", 0, 1), accept)
        later = table.submit(work.task("later", 1), accept)
        table.cancel(both)
        assert later.state is JobState.RUNNING
        for job in (one, later):
            await work.end(table, job)
        await table.close()

    asyncio.run(run())


def test_one_user_cannot_fill_the_queue() -> None:
    async def run() -> None:
        work = Work()
        table = JobTable(Witness().listener(), limits=JobLimits(jobs=1))
        for number in range(1 + WAITING):
            table.submit(work.task(f"{number}", owner=7), accept)
        with pytest.raises(Busy, match="uid 7 has 16 waiting jobs already"):
            table.submit(work.task("more", owner=7), accept)
        assert table.submit(work.task("mine", owner=8), accept).position == 1
        await table.close()

    asyncio.run(run())


def test_the_place_in_the_queue_is_on_the_bus_and_the_limit_can_be_raised(
    service: Service,
) -> None:
    assert service.reconfigure(msgspec.structs.replace(service.config, max_jobs=1)) == []
    first = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    assert service.get(first, "Job1", "Position") == "0"
    service.engine.stored["i"] = manifest("i")
    second = service.start("VerifyImage", "sa{sv}", "i", 0)
    assert service.get(second, "Job1", "State") == '"queued"'
    assert service.get(second, "Job1", "Position") == "1"
    service.reconfigure(msgspec.structs.replace(service.config, max_jobs=2))
    wait_for(service, second, "done")
    assert service.get(second, "Job1", "Position") == "0"


def test_the_gpus_of_a_job_are_those_of_the_processes_below_it(service: Service) -> None:
    one_each = msgspec.structs.replace(service.config, jobs_per_gpu=1)
    assert service.reconfigure(one_each) == []
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sibling,
    ):
        started = {pid: identify(pid).start_time for pid in (child.pid, sibling.pid)}
        service.engine.running = [
            this_process(pid=child.pid, start_time=started[child.pid], gpus=(0,)),
            this_process(pid=sibling.pid, start_time=started[sibling.pid], gpus=(0, 1)),
        ]
        service.call("ListProcesses")
        first = service.start("Checkpoint", "ua{sv}", child.pid, 0)
        second = service.start("Checkpoint", "ua{sv}", sibling.pid, 0)
        assert service.get(first, "Job1", "State") == '"running"'
        assert service.get(second, "Job1", "State") == '"queued"'
        service.engine.stored["i"] = manifest("i")  # of GPU 0
        third = service.start("Restore", "sa{sv}", "i", 0)
        assert service.get(third, "Job1", "Position") == "2"
        service.engine.go.set()
        for job in (first, second, third):
            wait_for(service, job, "done")
        child.communicate(b"\n")
        sibling.communicate(b"\n")


def test_a_job_beyond_its_users_share_is_in_nobodys_way() -> None:
    """It waits, and the jobs of others begin at once, also on the GPU that it waits for."""

    async def run() -> None:
        work = Work()
        table = JobTable(Witness().listener(), limits=JobLimits(jobs=8, per_gpu=4))

        def submit(name: str, owner: int) -> JobState:
            return table.submit(work.task(name, 0, owner=owner), accept).state

        running, queued = JobState.RUNNING, JobState.QUEUED
        assert [submit(name, 1000) for name in "abcd"] == [running, running, running, queued]
        assert submit("e", 2000) is running
        assert submit("f", 0) is queued, "the GPU has no more places"
        await table.close()

    asyncio.run(run())


def test_users_see_what_their_images_take_and_may_take(service: Service) -> None:
    mine, of_another = (
        manifest(name, owner=uid, blocks=(block(uid),)) for name, uid in (("a", STRANGER), ("b", 7))
    )
    service.engine.stored = {each.id: each for each in (mine, of_another)}
    service.call("ListImages")
    of_one, of_both = total_bytes([mine]), total_bytes([mine]) + total_bytes([of_another])
    assert of_both > of_one > 0

    def told(uid: int) -> list[int]:
        total, free, *rest = map(int, service.call("GetStorage", uid=uid).split()[1:])
        assert total >= free > 0
        return rest

    assert told(STRANGER) == [of_one, 0]
    limits = (UserLimits(user=STRANGER, quota=5 << 40),)
    service.reconfigure(msgspec.structs.replace(service.config, limits=limits))
    assert told(STRANGER) == [of_one, 5 << 40]
    assert told(0) == [of_both, 0]
    found = process_id(os.getpid())
    assert found is not None
    away = Away("kept", "memory", 5000, 0.0)
    ranks = (this_process(pid=pid, uid=STRANGER, state="suspended", away=away) for pid in (1, 2))
    service.engine.running = [*ranks, this_process(start_time=found.start_time)]
    service.call("ListProcesses")
    assert told(STRANGER) == [of_one + 5000, 5 << 40], "as a checkpoint that is refused counts"
    assert told(0) == [of_both, 0]
    status = as_nobody(service, "status").stdout
    assert re.search(r"images and suspended programs take .* of 5\.0 TiB that you may have", status)
