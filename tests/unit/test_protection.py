"""Which programs are protected follows from their images, their schedules and their jobs."""

from dataclasses import replace

import pytest

from phosd.interface.records import Image, Job, Process
from phosd.protection import TOLD, Protection, ended, programs, running

NOW = 10_000.0
PROCESS = Process("/process/7", pid=7, name="bert", user=1, user_name="ann", state="running")
IMAGE = Image("/image/i", id="i", created=NOW - 60.0)


def failed(number: int, operation: str = "checkpoint", target: str = "7") -> Job:
    return Job(f"/job/{number}", number=number, operation=operation, target=target, state="failed")


def test_what_waits_in_a_pool_has_nothing_to_lose() -> None:
    waits = replace(PROCESS, name="", waits=True, pool="chat", state="suspended")
    started = replace(waits, path="/p/8", pid=8, waits=False, state="running")
    first, second = programs([waits, started], [], [], NOW)
    assert (first.processes, first.protection) == ((started,), Protection.NEVER)
    assert (second.processes, second.protection) == ((waits,), Protection.WAITING)
    assert not second.protection.needs_attention
    assert running([first, second]) == 1


@pytest.mark.parametrize(
    ("every", "age", "expected"),
    [
        (0.0, None, Protection.NEVER),
        (60.0, None, Protection.NEVER),
        (0.0, 1e6, Protection.SAVED),
        (60.0, 89.0, Protection.PROTECTED),
        (60.0, 91.0, Protection.LATE),
    ],
)
def test_an_image_is_as_old_as_its_schedule_allows(
    every: float, age: float | None, expected: Protection
) -> None:
    images = [] if age is None else [replace(IMAGE, created=NOW - age)]
    (found,) = programs([replace(PROCESS, every=every, last_image="i")], images, [], NOW)
    assert (found.protection, found.name) == (expected, "bert")
    assert found.due == (NOW - age + every if every and age is not None else None)
    late = expected is Protection.LATE
    assert found.overdue(NOW) == (31.0 if late else 0.0), "since the next one was due"
    assert found.protection.needs_attention == (expected in (Protection.NEVER, Protection.LATE))


@pytest.mark.parametrize(
    ("jobs", "expected", "trouble"),
    [
        ([failed(1)], Protection.FAILED, 1),
        ([failed(1), replace(failed(2), state="done")], Protection.SAVED, None),
        ([replace(failed(1), state="done"), failed(2)], Protection.FAILED, 2),
        ([failed(1), replace(failed(2), state="cancelled")], Protection.FAILED, 1),
        ([failed(1), replace(failed(2), state="running")], Protection.FAILED, 1),
        ([failed(1, "migrate")], Protection.SAVED, 1),
        ([failed(1, "swap", "6 7")], Protection.SAVED, 1),
        ([failed(1, target="77")], Protection.SAVED, None),
        ([replace(failed(1), error="InvalidOption")], Protection.SAVED, None),
        ([failed(1), replace(failed(2), error="InvalidOption")], Protection.FAILED, 1),
        ([replace(failed(1), error="NotAuthorized")], Protection.FAILED, 1),
        ([replace(failed(1), error="Busy")], Protection.SAVED, None),
        ([failed(1), failed(2, "suspend")], Protection.FAILED, 2),
        ([failed(1), replace(failed(2, "suspend"), state="done")], Protection.FAILED, 1),
    ],
)
def test_what_failed_last_counts_until_it_succeeds(
    jobs: list[Job], expected: Protection, trouble: int | None
) -> None:
    (found,) = programs([replace(PROCESS, last_image="i")], [IMAGE], jobs, NOW)
    assert found.protection is expected
    assert (found.trouble and found.trouble.number) == trouble


def test_the_processes_of_a_name_are_one_program_and_the_worst_comes_first() -> None:
    rank = replace(
        PROCESS, pid=8, device_bytes=5, gpus=("/gpu/1",), state="suspended", restarter="unit b"
    )
    first = replace(PROCESS, device_bytes=2, gpus=("/gpu/0",), last_image="i")
    of_another = replace(PROCESS, pid=9, user=2, last_image="i")
    unnamed = [replace(PROCESS, pid=pid, name="") for pid in (4, 3)]
    found = programs([rank, first, of_another, *unnamed], [IMAGE], [], NOW)
    assert [[each.pid for each in one.processes] for one in found] == [[3], [4], [7, 8], [9]]
    bert = found[2]
    assert (bert.device_bytes, bert.gpus) == (7, ("/gpu/0", "/gpu/1"))
    assert bert.state == "suspended, running"
    assert (bert.image, bert.restarter) == (IMAGE, "unit b")


def made(number: int, image: str, *, scheduled: bool = True) -> Job:
    return replace(failed(number), state="done", result=image, scheduled=scheduled)


def test_a_program_that_a_schedule_saved_last_has_ended() -> None:
    image = replace(IMAGE, name="bert", owner=1, owner_name="ann", pid=7)
    jobs = [made(1, "i"), made(2, "i")]
    (found,) = ended([], [image], jobs, NOW)
    assert (found.name, found.user_name, found.image) == ("bert", "ann", image)
    assert (found.protection, found.processes) == (Protection.ENDED, ())
    assert not found.protection.needs_attention
    of_another = replace(PROCESS, user=2)
    assert ended([of_another], [image], jobs, NOW) == [found]


@pytest.mark.parametrize("why", ["runs", "by hand", "deleted", "long ago", "unnamed and runs"])
def test_it_is_not_told_that_it_has_ended(why: str) -> None:
    """It runs, perhaps restored; its newest image is not a schedule's, or gone; or it is old."""
    image = replace(IMAGE, name="" if why.startswith("unnamed") else "bert", owner=1, pid=7)
    running = [replace(PROCESS, name=image.name)] if why.endswith("runs") else []
    jobs = [made(1, "i")]
    if why == "by hand":
        jobs.append(made(2, "i", scheduled=False))
    images = [] if why == "deleted" else [image]
    now = NOW + TOLD if why == "long ago" else NOW
    assert ended(running, images, jobs, now) == []
