"""Waiting for a program's safe point, beside a hook that says what the tests want."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phosd.engine.hook_client.link import HookLink, ProgramState
from phosd.engine.hook_client.wire import PROGRAM_ASK, PROGRAM_STATE, Ask, ProgramOutcome, Status
from phosd.engine.job.progress import Progress
from phosd.engine.operations.safe_points import SafePointChoices, SafePoints
from phosd.errors import CallbackFailed, Cancelled, NoSuchProcess, Timeout
from tests.support.fake_hook import Answer, Request, fake_hook

ME = os.getpid()


def state(*, declared: int = 0, waiting: int = 0, refused: int = 0, wish: int = 0) -> Answer:
    return Answer(PROGRAM_STATE.pack(declared, waiting, refused, 0, wish, b"its words"))


def points(runtime: Path, progress: Progress, wish: int = 0, **choices: Any) -> SafePoints:
    member = SimpleNamespace(pid=ME, link=object())
    without_hook = SimpleNamespace(pid=1, link=None)
    group: Any = SimpleNamespace(
        members=[without_hook, member],
        runtime_dir=runtime,
        trees=[SimpleNamespace(root=SimpleNamespace(pid=ME))],
    )
    return SafePoints(group, SafePointChoices(**choices), 0.2, progress, wish)


def phases(progress: Progress) -> list[str]:
    return [phase.name for phase in progress.phases]


def reached(
    runtime: Path, script: Callable[[Request], Answer], **how: Any
) -> tuple[Progress, list[Request]]:
    progress = Progress()
    with fake_hook(runtime, script) as seen, points(runtime, progress, **how).reached():
        pass
    return progress, seen


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    return tmp_path / "run"


def asked(requests: list[Request]) -> list[int]:
    return [PROGRAM_ASK.unpack(request.payload)[0] for request in requests]


def test_a_program_without_safe_points_is_not_waited_for(runtime: Path) -> None:
    progress, seen = reached(runtime, lambda _: state())
    assert asked(seen) == [Ask.LOOK] and phases(progress) == []


def test_its_connection_is_closed_at_once(runtime: Path) -> None:
    """Whoever passes the hook's messages on may not close it for CRIU."""
    with (
        fake_hook(runtime, lambda _: state()),
        points(runtime, Progress()).reached(),
        HookLink(ME, runtime, 5) as other,  # the fake hook serves one client at a time
    ):
        assert not other.program().declared


def test_a_hook_that_is_too_old_is_not_waited_for(runtime: Path) -> None:
    answer = Answer(b"unknown request", status=Status.BAD_MESSAGE, close=True)
    progress, seen = reached(runtime, lambda _: answer)
    assert len(seen) == 1 and phases(progress) == []


def test_it_is_waited_for_until_a_thread_is_there(runtime: Path) -> None:
    answers = [state(declared=1)] * 4 + [state(declared=1, waiting=1)]
    progress, seen = reached(runtime, lambda _: answers.pop(0))
    assert asked(seen) == [Ask.LOOK, Ask.WANT, Ask.LOOK, Ask.LOOK, Ask.LOOK]
    assert phases(progress) == ["safe-point", "prepare"]
    assert not any(phase.stopped for phase in progress.phases)


def test_ranks_are_there_together(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is in the next step, and waits for the other one, which stands already."""
    monkeypatch.setattr("phosd.engine.operations.safe_points._TOGETHER", 0.05)
    passed: list[float] = []

    class Link:
        def __init__(self, ahead: bool) -> None:
            self.pid, self.ahead = ME, ahead

        def program(self) -> ProgramState:
            there = bool(passed) if self.ahead else passed == [] or len(passed) == 1
            return ProgramState(True, int(there), False, 0, "")

        def pass_safe_point(self) -> None:
            assert not self.ahead
            passed.append(time.monotonic())

    began = time.monotonic()
    links: Any = [Link(ahead=False), Link(ahead=True)]
    points(runtime, Progress(), callback_deadline=60)._wait(links)
    assert len(passed) == 1 and passed[0] - began >= 0.05


def test_who_asks_for_a_checkpoint_is_there(runtime: Path) -> None:
    progress, _ = reached(runtime, lambda _: state(waiting=1, wish=4), wish=4)
    assert phases(progress) == ["safe-point", "prepare"]


@pytest.mark.parametrize("wish", [0, 5])
def test_a_wish_that_is_gone_is_none(runtime: Path, wish: int) -> None:
    with pytest.raises(Cancelled, match=f"process {ME} does not ask for this checkpoint any more"):
        reached(runtime, lambda _: state(waiting=1, wish=wish), wish=4)


def test_what_a_callable_says_is_told(runtime: Path) -> None:
    with pytest.raises(CallbackFailed, match=f"process {ME} is not ready.*: its words") as raised:
        reached(runtime, lambda _: state(declared=1, refused=1))
    assert raised.value.hint


def test_there_is_a_deadline(runtime: Path) -> None:
    with pytest.raises(Timeout, match=f"process {ME} came to no safe point within 0.2 s"):
        reached(runtime, lambda _: state(declared=1))
    with pytest.raises(Timeout, match=r"within 0\.1 s"):
        reached(runtime, lambda _: state(declared=1), callback_deadline=0.1)


def test_it_may_be_stopped_where_it_is(runtime: Path) -> None:
    progress, _ = reached(runtime, lambda _: state(declared=1), without_callbacks=True)
    assert progress.notes == [
        f"process {ME} came to no safe point within 0.2 s, and was stopped where it was"
    ]


def test_a_job_that_is_cancelled_waits_no_longer(runtime: Path) -> None:
    progress = Progress()
    waits = points(runtime, progress, callback_deadline=600)

    def cancel(_: Request) -> Answer:
        progress.cancel()
        return state(declared=1)

    with fake_hook(runtime, cancel), pytest.raises(Cancelled), waits.reached():
        raise AssertionError("it is not there")


def test_a_process_that_ends_is_not_waited_for(runtime: Path) -> None:
    answers = [state(declared=1), state(declared=1), Answer(cut=0, close=True)]
    with pytest.raises(NoSuchProcess):
        reached(runtime, lambda _: answers.pop(0), callback_deadline=600)


def test_those_who_waited_are_told_of_the_image(runtime: Path) -> None:
    progress = Progress()
    waits = points(runtime, progress)
    with fake_hook(runtime, lambda _: state(waiting=1)) as seen:
        with waits.reached():
            pass
        waits.saved("hold", "best")
    ask, outcome, then, _, wish, text = PROGRAM_ASK.unpack(seen[-1].payload)
    assert (ask, outcome, then, wish) == (Ask.ANSWER, ProgramOutcome.SAVED, 2, 0)
    assert text.rstrip(b"\0") == b"best"
    assert progress.notes == []


def test_an_image_is_an_image_although_nobody_hears_of_it(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    waits = points(runtime, progress)
    with fake_hook(runtime, lambda _: state(waiting=1)), waits.reached():
        pass

    def gone(*_: object) -> None:
        raise NoSuchProcess("it has ended")

    monkeypatch.setattr("phosd.engine.operations.safe_points.reach", gone)
    waits.saved("run", "")
    assert progress.notes == [f"process {ME} was not told that it is saved: it has ended"]
