"""Checkpoints that repeat: their clock, what they keep, and what ends them."""

import asyncio
import itertools
import os
import sqlite3
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.errors import Busy, OutOfSpace, Unsupported
from phosd.service.history.history import History
from phosd.service.jobs.listener import Listener
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.jobs.schedule import PeriodicRule, Schedule, surplus
from phosd.service.jobs.table import Job, JobState, JobTable
from phosd.service.process_identity import Target, identify
from phosd.service.tasks.checkpoints import Checkpoints
from phosd.service.tasks.periodic import Periodic
from phosd.service.tasks.verifications import Verifications
from tests.support.fake_engine import FakeEngine, manifest, this_process

OFTEN = 0.05
"""Seconds; over the bus it would be refused, here it keeps the tests short."""


class Node:
    """A service without a bus."""

    def __init__(self, folder: Path, *rules: PeriodicRule) -> None:
        self.engine = FakeEngine()
        self.engine.go.set()
        self.history = History(folder / "history.db")
        self.jobs: list[Job] = []
        self.changed: list[Target] = []
        self.table = JobTable(Listener(started=self.jobs.append))
        self.checkpoints = Checkpoints(
            self.engine, self.history, self.table, lambda job, target: None
        )
        self.suspended: Callable[[Target], bool] = lambda target: False
        verifications = Verifications(self.engine, self.history, self.table, lambda job: None)
        self.periodic = Periodic(
            self.checkpoints,
            self.table,
            self.history,
            rules,
            self.changed.append,
            lambda target: self.suspended(target),
            verifications.rehearse_next,
        )

    def every(self, seconds: float, keep: int = 2, **options: object) -> Job:
        request = CheckpointRequest(every=seconds, keep=keep, **options)  # type: ignore[arg-type]
        return self.periodic.begin(ME, request, 0)

    @property
    def schedule(self) -> Schedule | None:
        return self.periodic.of(ME.pid, ME.start_time)

    def events(self) -> list[str]:
        """What was said of schedules."""
        self.history.flush()
        rows = self.history.query("select text from events where kind = 'schedule'")
        return [row["text"] for row in rows]

    def ends(self) -> list[str]:
        """The same without the checkpoints that a busy machine has left out."""
        return [text for text in self.events() if not text.endswith(" still ran")]


ME = identify(os.getpid())


@asynccontextmanager
async def node(folder: Path, *rules: PeriodicRule) -> AsyncIterator[Node]:
    found = Node(folder, *rules)
    try:
        yield found
    finally:
        found.engine.go.set()
        await found.periodic.close()
        await found.table.close()
        found.history.close()


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


def left_out_before(job: Job) -> int:
    """How many were left out between the one before and this one, which says so."""
    said = [note for note in job.progress.notes if note.endswith(" before it left out")]
    return int(said[0].split()[0]) if said else 0


@contextmanager
def a_child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        yield child
        child.kill()


def test_a_schedule_keeps_the_last_images_that_it_made_and_touches_no_other(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            here.engine.stored["by-hand"] = manifest("by-hand")
            here.history.image(here.engine.stored["by-hand"])
            asked = here.checkpoints.start(ME, CheckpointRequest(), 0)
            await here.table.wait(asked)
            here.every(OFTEN, keep=2, mode="stop")
            await until(lambda: len(here.jobs) > 5, "the checkpoints")
            here.periodic.end(ME, 0)
            await asyncio.gather(*(here.table.wait(job) for job in here.jobs))
            assert {job.state for job in here.jobs} == {JobState.DONE}
            assert [job.task.scheduled for job in here.jobs[:3]] == [False, True, True]
            made = [job.outcome.result for job in here.jobs]
            assert set(here.engine.stored) == {"by-hand", made[0], *made[-2:]}
            assert (
                here.engine.requests[1:]
                == [  # each shares what it can with the one before
                    CheckpointRequest(mode="stop", parent=before) for before in made[:-1]
                ]
            )
            here.history.flush()
            rows = here.history.query("select id from images where deleted is not null")
            assert {row["id"] for row in rows} == set(made[1:-2])

    asyncio.run(run())


def test_the_restore_of_each_image_is_rehearsed(tmp_path: Path) -> None:
    """Jobs of their own; without the option there are none."""

    async def run() -> None:
        async with node(tmp_path) as here:
            here.every(OFTEN, keep=2, rehearse=True)
            await until(lambda: len(here.engine.moves) > 2, "the rehearsals")
            here.periodic.end(ME, 0)
            await asyncio.gather(*(here.table.wait(job) for job in here.jobs))
            made = [j.outcome.result for j in here.jobs if j.task.operation == "checkpoint"]
            rehearsed = [image for _, image, *_ in here.engine.moves]
            assert rehearsed == made[: len(rehearsed)] and len(made) - len(rehearsed) <= 1
            assert CheckpointRequest(rehearse=True) not in here.engine.requests
            assert here.history.rehearsed().keys() == {*rehearsed}

    asyncio.run(run())


def test_the_clock_does_not_drift(tmp_path: Path) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            here.engine.act = lambda progress: time.sleep(0.3)
            begun = time.time()
            here.every(0.4)
            await until(lambda: len(here.jobs) > 7, "the checkpoints")
            slot, late = -1, []
            for job in here.jobs[:7]:
                slot += 1 + left_out_before(job)
                late.append(job.started - begun - 0.4 * slot)
            assert min(late) > -0.02
            # One may be late; a clock that drifts makes each later than the one before.
            assert min(late[4:]) < 0.5, "each waits for the end of the one before"

    asyncio.run(run())


def test_what_is_due_while_the_one_before_runs_is_left_out_and_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            here.engine.go.clear()
            first = here.every(0.2)
            await asyncio.sleep(1)
            assert here.jobs == [first]
            here.engine.go.set()
            await until(lambda: len(here.jobs) > 2, "the next ones")
            told = here.events()[0]
            count = int(told.split()[0])
            assert count >= 2
            assert told == f"{count} left out, because job {first.number} still ran"
            assert here.jobs[1].progress.notes == [
                f"{count} periodic checkpoints before it left out"
            ]
            # On a slow machine the first ones may take so long that more is left out.
            await until(
                lambda: any(not job.progress.notes for job in here.jobs[2:-1]),
                "one before which nothing was left out",
            )
            slot = -1
            for job in here.jobs[:-1]:  # none is counted twice, and none made up for
                slot += 1 + left_out_before(job)
                assert job.started - first.started > 0.2 * slot - 0.02

    asyncio.run(run())


def test_another_job_on_the_process_makes_one_wait_for_the_next_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            await here.table.wait(here.every(0.1))
            here.engine.go.clear()
            asked = here.checkpoints.start(ME, CheckpointRequest(), 0)
            await asyncio.sleep(0.6)
            assert here.jobs[-1] is asked
            here.engine.go.set()
            await until(lambda: here.jobs[-1] is not asked, "the next one")
            (first, _, following, *_) = here.jobs
            await here.table.wait(following)
            assert following.task.scheduled
            text = f"one left out: job {asked.number} (checkpoint {ME.pid}) holds"
            told = [event for event in here.events() if event.startswith(text)]
            assert len(told) >= 2
            count = left_out_before(following)
            assert following.progress.notes == [f"{count} periodic checkpoints before it left out"]
            # What is due while the event loop is late counts too, and is not told one by one.
            assert len(told) <= count
            assert 0.1 * (count + 1) <= following.started - first.started + 0.02

    asyncio.run(run())


def test_a_failure_makes_it_wait_longer_and_a_success_ends_that(tmp_path: Path) -> None:
    errors = [OutOfSpace("full"), Busy("it does not come to rest")]

    def act(progress: Progress) -> None:
        if errors:
            raise errors.pop(0)

    async def run() -> None:
        async with node(tmp_path) as here:
            here.engine.act = act
            here.every(0.1)
            await until(lambda: len(here.jobs) > 8, "the checkpoints")
            times = [job.started - here.jobs[0].started for job in here.jobs]
            # 0.2 seconds, and then 0.4 more, however late the one between was.
            assert times[1] > 0.18
            assert times[2] > 0.58
            assert min(b - a for a, b in itertools.pairwise(times[2:])) < 0.35
            states = [job.state for job in here.jobs[:3]]
            assert states == [JobState.FAILED, JobState.FAILED, JobState.DONE]

    asyncio.run(run())


def test_an_error_that_time_does_not_mend_ends_the_schedule(tmp_path: Path) -> None:
    def act(progress: Progress) -> None:
        raise Unsupported("it uses managed memory", hint="none")

    async def run() -> None:
        async with node(tmp_path) as here:
            here.engine.act = act
            await here.table.wait(here.every(OFTEN))
            await until(lambda: here.schedule and here.schedule.ended, "the end")
            assert here.schedule is not None
            assert here.schedule.every == 0
            assert here.ends() == ["ended: it uses managed memory; none"]
            await asyncio.sleep(3 * OFTEN)
            assert len(here.jobs) == 1
            assert here.changed == [ME, ME]

    asyncio.run(run())


def test_a_busy_process_gets_no_schedule_unless_asked_to_wait(tmp_path: Path) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            here.engine.go.clear()
            here.checkpoints.start(ME, CheckpointRequest(), 0)
            with pytest.raises(Busy, match="job 1 "):
                here.every(OFTEN)
            assert here.schedule is None
            first = here.every(OFTEN, queue=True)
            assert (here.schedule is not None, first.state) == (True, JobState.QUEUED)
            here.engine.go.set()
            await here.table.wait(first)
            await until(lambda: len(here.jobs) > 3, "the next ones")

    asyncio.run(run())


def test_a_schedule_ends_with_its_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            with a_child() as child:
                target = identify(child.pid)
                request = CheckpointRequest(every=OFTEN)
                await here.table.wait(here.periodic.begin(target, request, 0))
                here.history.flush()
                assert len(here.history.schedules()) == 1
            await until(lambda: here.periodic.of(target.pid, target.start_time) is None, "its end")
            here.history.flush()
            (image,) = [*here.engine.stored][-1:]
            told = here.history.schedule_of(image)  # who restores one of its images is told
            assert told is not None and (told.target, told.every) == (target, OFTEN)
            assert here.ends() == ["ended with the program; `phos images` lists its images"]
            assert here.engine.made >= 1
            assert {job.error for job in here.jobs} == {None}

    asyncio.run(run())


def test_the_next_phosd_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    async def first() -> None:
        async with node(tmp_path) as here:
            options = {"mode": "stop", "tcp": "close", "release_cached": True}
            await here.table.wait(here.every(0.3, keep=3, **options))
            with a_child() as child:
                gone = CheckpointRequest(every=3600.0)
                await here.table.wait(here.periodic.begin(identify(child.pid), gone, 0))
            here.history.flush()
            assert len(here.history.schedules()) == 2

    async def second() -> None:
        async with node(tmp_path) as here:
            here.periodic.start()
            assert here.schedule is not None
            assert (here.schedule.every, here.schedule.keep) == (0.3, 3)
            here.history.flush()
            assert ME.pid in [row["pid"] for row in here.history.schedules()]
            await until(lambda: here.engine.made, "the next one")
            expected = CheckpointRequest(mode="stop", tcp="close", release_cached=True)
            assert here.engine.requests == [expected]
            here.periodic.end(ME, 0)
            here.history.flush()

    async def third() -> None:
        async with node(tmp_path, PeriodicRule(every=OFTEN)) as here:
            here.periodic.start()
            here.periodic.consider([this_process(start_time=ME.start_time)])
            await asyncio.sleep(3 * OFTEN)
            assert here.jobs == []  # it was ended by hand: no rule begins it again
            assert here.schedule is not None

    for part in (first, second, third):
        asyncio.run(part())


def write(folder: Path, *statements: str) -> None:
    """Change the database behind the history's back."""
    with closing(sqlite3.connect(folder / "history.db")) as other:
        for statement in statements:
            other.execute(statement)
        other.commit()


def test_a_schedule_that_another_version_wrote_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            here.history.schedule(Schedule("boot", ME, 0, CheckpointRequest(every=1.0)))
            here.history.flush()
            write(tmp_path, "update schedules set options = '{\"new\": 1}'")
            here.periodic.start()
            assert here.schedule is None

    asyncio.run(run())
    assert f"the schedule of process {ME.pid} cannot be read" in caplog.text


def test_rules_begin_schedules_for_processes_that_fit(tmp_path: Path) -> None:
    rules = (
        PeriodicRule(every=0.3, keep=4, user=12345),
        PeriodicRule(every=0.2, keep=3, command="*train.py*"),
        PeriodicRule(every=OFTEN),
    )

    async def run() -> None:
        async with node(tmp_path, *rules) as here:
            begun = time.monotonic()
            for _ in range(3):  # it is looked at again and again
                here.periodic.consider([this_process(start_time=ME.start_time)])
            assert here.schedule is not None
            assert (here.schedule.every, here.schedule.keep) == (0.2, 3)
            await until(lambda: here.jobs, "the first one")
            assert time.monotonic() - begun > 0.18
            assert here.jobs[0].task.owner == ME.uid
            with a_child() as child:  # of a process with a schedule: saved with that one
                worker = this_process(pid=child.pid, start_time=identify(child.pid).start_time)
                here.periodic.consider([worker])
                assert here.periodic.of(worker.pid, worker.start_time) is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("images", "keep", "gone"),
    [
        ({}, 1, []),
        ({"c": None}, 1, []),
        ({"c": None, "b": True, "a": None}, 2, ["a"]),
        ({"c": False, "b": None, "a": True}, 2, []),
        ({"c": False, "b": False}, 1, []),
        ({"d": None, "c": False, "b": None, "a": None}, 2, ["a"]),
        ({"d": None, "c": False, "b": None, "a": None}, 1, ["c", "b", "a"]),
    ],
)
def test_the_last_good_images_stay(
    images: dict[str, bool | None], keep: int, gone: list[str]
) -> None:
    assert surplus(images, keep) == gone


def test_an_image_that_cannot_be_deleted_now_is_told_and_goes_later(tmp_path: Path) -> None:
    held = {"image-0"}
    allowed = threading.Semaphore(2)  # no checkpoint after the one that is looked at

    def act(progress: Progress) -> None:
        allowed.acquire(timeout=30)

    async def run() -> None:
        async with node(tmp_path) as here:
            here.engine.act = act
            delete = here.engine.delete_image

            def busy(image: str) -> None:
                if image in held:
                    raise Busy(f"image {image} is being read by a job", hint="wait for it")
                delete(image)

            here.engine.delete_image = busy  # type: ignore[method-assign]
            here.every(0.2, keep=1)
            await until(lambda: here.engine.made == 2, "the second one")
            await here.table.wait(here.jobs[1])
            assert (
                "image image-0 is due for deletion, and stays for now: image image-0 is being read "
                "by a job; wait for it"
            ) in here.jobs[1].progress.notes
            assert here.jobs[1].state is JobState.DONE
            assert set(here.engine.stored) == {"image-0", "image-1"}
            held.clear()
            allowed.release()
            await until(lambda: here.engine.made == 3, "the third one")
            await here.table.wait(here.jobs[2])
            assert set(here.engine.stored) == {"image-2"}
            allowed.release()

    asyncio.run(run())


def test_a_history_that_cannot_be_read_stops_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            here.history.flush()
            write(tmp_path, "drop table kernels", "drop table images")
            here.every(OFTEN, keep=1)
            await until(lambda: len(here.jobs) > 2, "the checkpoints")
            await here.table.wait(here.jobs[2])
            assert [job.state for job in here.jobs[:3]] == [JobState.DONE] * 3
            assert here.history.renewals == 1

    asyncio.run(run())
    assert "lacks" in caplog.text
