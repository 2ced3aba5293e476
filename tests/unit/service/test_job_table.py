"""The job table by itself: what is kept, what is forgotten, and how it closes."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable

import pytest

from phosd.engine.job.progress import Progress
from phosd.errors import Busy, InvalidOption, Unsupported
from phosd.service.jobs.limits import JobLimits
from phosd.service.jobs.listener import Listener
from phosd.service.jobs.table import (
    IDLE,
    KEPT,
    RECALLED,
    WAITING,
    Job,
    JobState,
    JobTable,
    Outcome,
    Task,
)


class Witness:
    """Hears everything that a table tells."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.states: list[JobState] = []
        """States of jobs whose work was over."""

    def listener(self) -> Listener:
        def hear(what: str) -> Callable[[Job], None]:
            return lambda job: self.heard.append((what, job.number))

        async def concluding(job: Job) -> None:
            self.states.append(job.state)

        return Listener(
            started=hear("started"),
            moved=hear("moved"),
            progressed=hear("progressed"),
            concluding=concluding,
            ended=hear("ended"),
            forgotten=hear("forgotten"),
        )


def task(work: Callable[[Progress], Outcome], *claims: str, token: str = "") -> Task:
    return Task("checkpoint", "7", 0, frozenset(claims), work, token=token)


def nothing(_: Progress) -> Outcome:
    return Outcome("done")


def until_cancelled(progress: Progress) -> Outcome:
    while True:
        threading.Event().wait(0.005)
        progress.check()


def accept(_: Job) -> None:
    """No objection."""


def test_a_job_runs_until_its_results_are_out() -> None:
    witness = Witness()

    async def run() -> Job:
        table = JobTable(witness.listener())
        job = table.submit(task(nothing), accept)
        await table.wait(job)
        return job

    job = asyncio.run(run())
    assert witness.states == [JobState.RUNNING]
    assert job.state is JobState.DONE


def test_only_so_many_ended_jobs_are_kept_and_their_tokens_with_them() -> None:
    witness = Witness()

    async def run() -> None:
        table = JobTable(witness.listener())
        first = table.submit(task(nothing, token="a"), accept)
        await table.wait(first)
        for _ in range(KEPT):
            await table.wait(table.submit(task(nothing), accept))
        assert [job.number for job in table] == list(range(2, KEPT + 2))
        again = table.submit(task(nothing, token="a"), accept)
        assert again.number == KEPT + 2
        await table.close()

    asyncio.run(run())
    assert ("forgotten", 1) in witness.heard
    assert witness.heard.index(("started", 1)) < witness.heard.index(("ended", 1))


def test_a_token_is_its_user_s_own() -> None:
    """Nobody is given the job of another user, who has chosen the same word."""

    async def run() -> None:
        table = JobTable(Witness().listener())
        once = task(nothing, token="a")
        theirs = dataclasses.replace(once, owner=1000)
        first, other = table.submit(once, accept), table.submit(theirs, accept)
        assert first is table.submit(once, accept)
        assert other is table.submit(theirs, accept)
        assert first.number != other.number
        await table.close()

    asyncio.run(run())


def test_a_job_that_is_not_here_any_more_is_recalled_by_its_token() -> None:
    async def run() -> None:
        meant = dataclasses.replace(task(nothing, token="a"), process="boot 7 1")
        past = Job(3, meant, 0.0, state=JobState.DONE)
        asked: list[tuple[int, str]] = []

        def recall(owner: int, token: str) -> Job | None:
            asked.append((owner, token))
            return past if token == "a" else None

        table = JobTable(Listener(recall=recall), 7)
        assert table.submit(task(nothing, token="a"), accept) is past
        assert table.submit(task(nothing, token="a"), accept) is past
        assert table.numbered(3) is past
        other = table.submit(task(nothing, token="b"), accept)
        assert other.number == 7
        of_another = dataclasses.replace(meant, target="8")
        of_its_pid = dataclasses.replace(meant, process="boot 7 2")
        for wanted in (of_another, of_its_pid):
            with pytest.raises(InvalidOption, match="token 'a' belongs to job 3"):
                table.submit(wanted, accept)
        assert asked == [(0, "a"), (0, "b")]
        await table.close()

    asyncio.run(run())


def test_jobs_that_are_recalled_take_the_place_of_no_others() -> None:
    witness = Witness()

    def recall(owner: int, token: str) -> Job | None:
        past = dataclasses.replace(task(nothing, token=token), owner=owner)
        return Job(int(token), past, 0.0, state=JobState.DONE) if token.isdecimal() else None

    async def run() -> None:
        listener = dataclasses.replace(witness.listener(), recall=recall)
        table = JobTable(listener, 1000)
        ended = table.submit(task(nothing), accept)
        await table.wait(ended)
        theirs = dataclasses.replace(task(nothing, token="1"), owner=7)
        first = table.submit(theirs, accept)
        for number in range(2, 2 * KEPT):
            table.submit(task(nothing, token=str(number)), accept)
        assert table.numbered(1000) is ended and table.numbered(1) is first
        there = [each for each in range(2, 2 * KEPT) if table.numbered(each)]
        assert there == [*range(2 * KEPT - RECALLED, 2 * KEPT)], "a few of each user"
        assert table.submit(theirs, accept) is first
        await table.close()

    asyncio.run(run())
    forgotten = [number for what, number in witness.heard if what == "forgotten"]
    assert forgotten == [*range(2, 2 * KEPT - RECALLED)]


def test_closing_cancels_what_runs_and_waits_for_it() -> None:
    async def run() -> Job:
        table = JobTable(Witness().listener(), first_number=5)
        job = table.submit(task(until_cancelled, "process 1"), accept)
        with pytest.raises(Busy, match="job 5 "):
            table.submit(task(nothing, "process 1", "image x"), accept)
        assert table.claimed("process") == ["process 1"]
        await table.close()
        assert table.claimed("process") == []
        with pytest.raises(Unsupported, match="has ended already"):
            table.cancel(job)
        return job

    job = asyncio.run(run())
    assert (job.number, job.state) == (5, JobState.CANCELLED)
    assert job.ended is not None


def test_a_refusal_before_the_start_leaves_no_trace() -> None:
    witness = Witness()

    def refuse(_: Job) -> None:
        raise Busy("no", hint="later")

    async def run() -> None:
        table = JobTable(witness.listener())
        with pytest.raises(Busy, match="no; later"):
            table.submit(task(nothing, "process 1", token="t"), refuse)
        assert table.claimed("process") == []
        job = table.submit(task(nothing, "process 1", token="t"), accept)
        assert job.number == 1
        await table.wait(job)
        await table.wait(job)
        assert job.outcome == Outcome("done")
        await table.close()

    asyncio.run(run())
    assert [what for what, _ in witness.heard if what == "started"] == ["started"]


def test_nobody_waits_for_stuck_jobs() -> None:
    """They have no slot, and their user cannot have many."""
    release = threading.Event()

    def stuck(progress: Progress) -> Outcome:
        progress.held_up()
        release.wait()
        return Outcome("done")

    async def run() -> None:
        table = JobTable(Witness().listener(), limits=JobLimits(jobs=1))
        jobs = [table.submit(task(stuck), accept)]
        for _ in range(IDLE - 1):
            jobs.append(table.submit(task(stuck), accept))
            while jobs[-1].state is JobState.QUEUED:
                await asyncio.sleep(0.01)
            while not jobs[-1].progress.stuck:
                await asyncio.sleep(0.01)
        with pytest.raises(Busy, match="wait for file systems"):
            table.submit(task(nothing), accept)
        other = table.submit(dataclasses.replace(task(nothing), owner=77), accept)
        await table.wait(other)
        assert other.state is JobState.DONE
        release.set()
        for job in jobs:
            await table.wait(job)
        await table.wait(table.submit(task(nothing), accept))
        await table.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_nobody_waits_for_a_job_that_holds_its_program() -> None:
    """It ends when it is told to go on, or cancelled: the program goes on in both cases."""

    def holding(progress: Progress) -> Outcome:
        progress.made("image")
        progress.hold()
        return Outcome("image")

    async def run() -> None:
        table = JobTable(Witness().listener(), limits=JobLimits(jobs=1))
        first = table.submit(task(holding), accept)
        while not first.progress.holding:
            await asyncio.sleep(0.01)
        second = table.submit(task(holding), accept)
        while not second.progress.holding:
            await asyncio.sleep(0.01)
        first.progress.go_on()
        table.cancel(second)
        for job in (first, second):
            await table.wait(job)
            assert (job.state, job.outcome.result) == (JobState.DONE, "image")
        await table.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def on(holder: threading.Event, done: list[str], name: str) -> Callable[[Progress], Outcome]:
    """Work that lasts until the event, and says when it is done."""

    def work(progress: Progress) -> Outcome:
        while not holder.wait(0.005):
            progress.check()
        done.append(name)
        return Outcome(name)

    return work


def waiting(work: Callable[[Progress], Outcome], *claims: str, owner: int = 0) -> Task:
    return Task("checkpoint", "7", owner, frozenset(claims), work, queue=True)


def test_jobs_that_queue_begin_in_order_when_their_claims_are_free() -> None:
    witness = Witness()
    go, done = threading.Event(), list[str]()

    async def run() -> None:
        table = JobTable(witness.listener())
        first = table.submit(task(on(go, done, "1"), "process 1"), accept)
        second = table.submit(waiting(on(go, done, "2"), "process 1"), accept)
        third = table.submit(waiting(on(go, done, "3"), "process 1"), accept)
        other = table.submit(waiting(on(threading.Event(), done, "4"), "process 2"), accept)
        states = [job.state for job in (first, second, third, other)]
        assert states == ["running", "queued", "queued", "running"]
        with pytest.raises(Busy, match="job 1 "):
            table.submit(task(nothing, "process 1"), accept)
        asked = second.started
        go.set()
        await table.wait(third)
        assert done == ["1", "2", "3"]
        assert second.started > asked
        table.cancel(other)
        await table.wait(other)
        await table.close()

    asyncio.run(run())
    assert [n for what, n in witness.heard if what == "moved"] == [2, 3]
    assert [n for what, n in witness.heard if what == "ended"] == [1, 2, 3, 4]


def test_a_job_that_waits_is_cancelled_without_having_begun() -> None:
    done = list[str]()

    async def run() -> None:
        table = JobTable(Witness().listener())
        first = table.submit(task(until_cancelled, "process 1"), accept)
        second = table.submit(waiting(on(threading.Event(), done, "2"), "process 1"), accept)
        third = table.submit(waiting(on(threading.Event(), done, "3"), "process 1"), accept)
        table.cancel(second)
        assert (second.state, str(second.error)) == (
            JobState.CANCELLED,
            "the job was cancelled before it began",
        )
        assert first.state is JobState.RUNNING
        await table.close()
        assert (first.state, third.state) == (JobState.CANCELLED, JobState.CANCELLED)
        with pytest.raises(Busy, match="phosd is ending"):
            table.submit(task(nothing), accept)

    asyncio.run(run())
    assert done == []


def test_so_many_jobs_of_a_user_wait_and_no_more() -> None:
    async def run() -> None:
        table = JobTable(Witness().listener())
        table.submit(task(until_cancelled, "process 1"), accept)
        for _ in range(WAITING):
            table.submit(waiting(nothing, "process 1", owner=5), accept)
        with pytest.raises(Busy, match=f"uid 5 has {WAITING} waiting jobs already"):
            table.submit(waiting(nothing, "process 1", owner=5), accept)
        table.submit(waiting(nothing, "process 1", owner=6), accept)
        await table.close()

    asyncio.run(run())


def test_what_speaks_against_a_job_when_its_turn_comes_ends_it() -> None:
    go = threading.Event()

    async def run() -> None:
        table = JobTable(Witness().listener())
        first = table.submit(task(on(go, [], "1"), "process 1"), accept)

        def refuse(_: Job) -> None:
            raise Unsupported("the journal is full", hint="make room")

        second = table.submit(waiting(nothing, "process 1"), refuse)
        third = table.submit(waiting(nothing, "process 1"), accept)
        assert second.state is JobState.QUEUED
        go.set()
        await table.wait(first)
        await table.wait(third)
        assert (second.state, str(second.error)) == (
            JobState.FAILED,
            "the journal is full; make room",
        )
        assert third.state is JobState.DONE
        await table.close()

    asyncio.run(run())


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_the_engine_finds_busy_is_waited_for_while_others_run(
    stopped: bool,
) -> None:
    """Two processes that share device memory: only the engine knows, when the job has begun."""
    go, tries = threading.Event(), list[bool]()

    def work(progress: Progress) -> Outcome:
        progress.phase("prepare")
        if stopped:
            progress.phase("quiesce", stopped=True)
        tries.append(go.is_set())
        if not go.is_set():
            raise Busy("another job works on process 1")
        return Outcome("saved")

    async def run() -> None:
        table = JobTable(Witness().listener())
        first = table.submit(task(on(go, [], "1"), "process 1"), accept)
        second = table.submit(waiting(work, "process 2"), accept)
        for _ in range(200):
            await asyncio.sleep(0.005)
            if second.state is not JobState.RUNNING:
                break
        await asyncio.sleep(0.05)
        assert tries == [False], "it tries again only when another job has ended"
        go.set()
        await table.wait(first)
        await table.wait(second)
        if stopped:  # then it may cost the program, and is not done in silence
            assert (second.state, tries) == (JobState.FAILED, [False])
        else:
            assert (second.state, tries) == (JobState.DONE, [False, True])
            assert [phase.name for phase in second.progress.phases] == ["prepare"]
        await table.close()

    asyncio.run(run())


def test_a_busy_engine_with_no_other_job_is_an_error() -> None:
    def busy(_: Progress) -> Outcome:
        raise Busy("another phosd works on it")

    async def run() -> None:
        table = JobTable(Witness().listener())
        job = table.submit(waiting(busy, "process 1"), accept)
        await table.wait(job)
        assert job.state is JobState.FAILED
        await table.close()

    asyncio.run(run())
