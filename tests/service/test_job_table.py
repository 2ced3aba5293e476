"""The job table by itself: what is kept, what is forgotten, and how it closes."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from phosd.engine.errors import Busy, Unsupported
from phosd.engine.progress import Progress
from phosd.service.jobs import KEPT, Job, JobState, JobTable, Listener, Outcome, Task


class Witness:
    """Hears everything that a table tells."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def listener(self) -> Listener:
        def hear(what: str) -> Callable[[Job], None]:
            return lambda job: self.heard.append((what, job.number))

        return Listener(*map(hear, ("started", "moved", "progressed", "ended", "forgotten")))


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
