"""Closing the gates of several processes together, with links whose answers a test decides."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from phosd.engine.hook_client import gate as gate_module
from phosd.engine.hook_client import long_work
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.hook_client.link import LONGEST_WAIT, GateState, HookLink
from phosd.engine.hook_client.wire import Type
from phosd.engine.job import progress as progress_module
from phosd.engine.job.affected import AffectedSet
from phosd.engine.job.progress import Beside, Progress
from phosd.errors import Busy, Cancelled, Internal, NoSuchProcess, PhosError, Timeout
from tests.support.fake_hook import Answer, Request, count, fake_hook, gate
from tests.support.records import naming


class Link:
    """A gate that settles when its answers say so; keeps what it was told."""

    def __init__(self, pid: int, answers: Iterator[GateState | PhosError]) -> None:
        self.pid = pid
        self.connected = True
        self.open = True
        self.told: list[int] = []
        self.cannot_open: PhosError | None = None
        self.inside: Iterator[int] = iter((0,))
        """How many threads are in a call, each time that it is asked to seal."""
        self.sealed = False
        self._answers = answers

    def close_gate(
        self, deadline: float, *, wait: float = LONGEST_WAIT, for_peers: int = 0
    ) -> GateState:
        self.open = False
        self.told.append(for_peers)
        answer = next(self._answers)
        if isinstance(answer, PhosError):
            self.connected = isinstance(answer, Busy)
            self.open = True  # the hook opens at a lost connection and at its own deadline
            raise answer
        return answer

    def seal_gate(self) -> int:
        assert not self.open
        inside = next(self.inside, 0)
        self.sealed = not inside
        return inside

    def open_gate(self) -> None:
        if self.cannot_open:
            raise self.cannot_open
        self.open = True
        self.sealed = False


def state(*, settled: bool = False, busy: bool = False, capturing: int = 0) -> GateState:
    return GateState(settled, busy, 2, capturing, 0, 0, 0)


def forever(answer: GateState) -> Iterator[GateState | PhosError]:
    while True:
        yield answer


def after(*answers: GateState | PhosError) -> Iterator[GateState | PhosError]:
    yield from answers
    yield from forever(state(settled=True))


def closed(
    *links: Link, progress: Progress | None = None, deadline: float = 5
) -> Callable[[], None]:
    """Close them and say that they are."""

    def run() -> None:
        hooks = [cast(HookLink, link) for link in links]
        with closed_gates(hooks, progress or naming(1, 2, 3), deadline):
            assert not any(link.open for link in links)
            assert all(link.sealed for link in links)

    return run


def test_they_settle_one_after_the_other() -> None:
    links = [Link(1, after()), Link(2, after(state(busy=True), state()))]
    closed(*links)()
    assert all(link.open for link in links)
    assert len(links[0].told) == len(links[1].told) == 3


def test_all_have_settled_before_one_is_sealed() -> None:
    """What one asks its driver for may be what another's device waits for."""
    order: list[str] = []

    class Ordered(Link):
        def close_gate(
            self, deadline: float, *, wait: float = LONGEST_WAIT, for_peers: int = 0
        ) -> GateState:
            order.append("close")
            return super().close_gate(deadline, wait=wait, for_peers=for_peers)

        def seal_gate(self) -> int:
            order.append("seal")
            return super().seal_gate()

    links = [Ordered(1, after()), Ordered(2, after(state(busy=True)))]
    links[1].inside = iter((2, 1, 0))
    closed(*links)()
    assert order == ["close"] * 4 + ["seal"] * 6


def test_a_call_that_does_not_return() -> None:
    links = [Link(1, after()), Link(2, after())]
    links[1].inside = itertools.repeat(1)
    with pytest.raises(Busy, match="process 2 is in a call into the driver that does not return"):
        closed(*links, deadline=0.1)()
    assert all(link.open for link in links)


def test_the_program_goes_on_while_a_call_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling a kernel is one: nobody else should have to stand still for so long."""
    monkeypatch.setattr(gate_module, "_SEAL_SECONDS", 0.02)
    links = [Link(1, after()), Link(2, after())]
    opened: list[int] = []

    def inside() -> Iterator[int]:
        while len(opened) < 2:
            yield 1

    def open_gate() -> None:
        opened.append(sum(link.sealed for link in links))
        Link.open_gate(links[0])

    links[1].inside = inside()
    monkeypatch.setattr(links[0], "open_gate", open_gate)
    closed(*links)()
    assert len(opened) == 3, "twice on the way, and at the end"


def test_cancelled_while_a_call_does_not_return() -> None:
    link, progress = Link(1, after()), naming(1)

    def inside() -> Iterator[int]:
        progress.cancel()
        yield from itertools.repeat(1)

    link.inside = inside()
    with pytest.raises(Cancelled):
        closed(link, progress=progress)()
    assert link.open


def test_who_is_busy_is_told_to_the_others_only() -> None:
    """Unsettled is not busy: two that wait for each other would never settle."""
    busy, idle, third = (
        Link(1, after(state(busy=True), state(busy=True))),
        Link(2, after(state(), state())),
        Link(3, after()),
    )
    closed(busy, idle, third)()
    assert busy.told == [0, 0, 0]
    assert idle.told == third.told == [0, 1, 1]


class Behind(Link):
    """A rank that must make so many launches before its peer, which waits for the last, rests."""

    def __init__(self, pid: int, launches: int) -> None:
        super().__init__(pid, forever(state()))
        self.left = launches

    def close_gate(
        self, deadline: float, *, wait: float = LONGEST_WAIT, for_peers: int = 0
    ) -> GateState:
        super().close_gate(deadline, wait=wait, for_peers=for_peers)
        self.left -= for_peers
        return state(settled=not for_peers)


class Waiting(Link):
    """The peer."""

    def __init__(self, pid: int, behind: Behind) -> None:
        super().__init__(pid, forever(state()))
        self._behind = behind

    def close_gate(
        self, deadline: float, *, wait: float = LONGEST_WAIT, for_peers: int = 0
    ) -> GateState:
        super().close_gate(deadline, wait=wait, for_peers=for_peers)
        rests = self._behind.left <= 0
        return state(settled=rests and not for_peers, busy=not rests)


@pytest.mark.parametrize("launches", [1, 5, 50, 700])
def test_a_rank_that_is_far_behind_catches_up_soon_and_not_too_far(launches: int) -> None:
    """Each launch of a rank that nobody waits for may make its peers wait in turn."""
    behind = Behind(1, launches)
    waiting = Waiting(2, behind)
    closed(behind, waiting)()
    assert not any(waiting.told)
    assert len(behind.told) <= min(launches, 128) + 3
    assert -behind.left <= max(1, launches // 5)


def test_when_others_are_busy_than_before_it_begins_anew() -> None:
    """Nobody knows then how far behind the rest are."""
    at_work, idle = state(busy=True), state()
    first = Link(1, after(*[at_work] * 20, *[idle] * 3))
    second = Link(2, after(*[idle] * 20, *[at_work] * 3))
    third = Link(3, after(*[idle] * 23))
    closed(first, second, third)()
    assert third.told[:21] == [0, *[1] * 8, *[2] * 8, *[3] * 4]
    assert third.told[21:] == [1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (state(busy=True), "process 1 keeps its GPU busy, 2 threads held"),
        (state(capturing=1, busy=True), "process 1 is capturing a stream"),
        (state(), "calls into the driver did not return"),
    ],
)
def test_the_deadline_passes(answer: GateState, why: str) -> None:
    links = [Link(1, forever(answer)), Link(2, after())]
    began = time.monotonic()
    with pytest.raises(Busy, match=why):
        closed(*links, deadline=0.1)()
    assert 0.1 <= time.monotonic() - began < 10
    assert all(link.open for link in links)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "trouble",
    [
        NoSuchProcess("it ended", hint="see"),
        Timeout("no answer", hint="see"),
        Internal("nonsense", hint="see"),
        Busy("its own deadline", hint="see"),
    ],
)
def test_one_fails_while_it_closes(which: int, trouble: PhosError) -> None:
    """The others open again, and the error is what went wrong, not what followed."""
    links = [Link(1, forever(state(busy=True))), Link(2, forever(state()))]
    links[which] = Link(which + 1, after(state(), trouble))
    with pytest.raises(type(trouble), match=trouble.what) as raised:
        closed(*links)()
    assert all(link.open for link in links)
    assert not getattr(raised.value, "__notes__", ())


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (gate_module, long_work, progress_module):
        monkeypatch.setattr(module, "time", made)
    return made


class Loop(Link):
    """A program that launches a kernel of so many seconds, or so many ``kernels`` that take as
    long in all, as soon as the last one has ended, and began ``gone`` seconds ago.
    """

    def __init__(self, clock: Clock, length: float, gone: float, kernels: int = 1) -> None:
        super().__init__(1, forever(state()))
        self._clock, self._length, self._kernels = clock, length, kernels
        self._began = clock.now - gone
        self._end = clock.now + length - gone
        self._noted: tuple[float, float] | None = None
        """When it was noted what had been submitted, and when that ends."""

    def _runs_on(self) -> None:
        while self.open and self._end <= self._clock.now:
            self._end += self._length

    def close_gate(
        self, deadline: float, *, wait: float = LONGEST_WAIT, for_peers: int = 0
    ) -> GateState:
        self._runs_on()
        super().close_gate(deadline, wait=wait, for_peers=for_peers)
        if self._noted is None or self._noted[1] <= self._clock.now:
            self._noted = self._clock.now, self._end
        self._clock.now += wait
        idle = self._end <= self._clock.now
        return state(settled=idle, busy=not idle)

    def open_gate(self) -> None:
        super().open_gate()
        if self._end <= self._clock.now:
            self._end = self._clock.now + self._length

    def unfinished(self) -> float:
        self._runs_on()
        since, end = self._noted or (0.0, 0.0)
        return self._clock.now - since if end > self._clock.now else 0.0

    def launch_count(self, count_seconds: int = 0) -> float:
        self._runs_on()
        return self._kernels * round((self._end - self._began) / self._length)


def stopped_by(loop: Loop, deadline: float) -> Progress:
    progress = naming(1)
    progress.phase("quiesce", stopped=True)
    closed(loop, progress=progress, deadline=deadline)()
    progress.finish()
    return progress


@pytest.mark.parametrize("gone", [0.0, 1.0, 4.5, 9.5])
def test_a_program_does_not_stand_still_for_its_own_long_kernels(clock: Clock, gone: float) -> None:
    """It runs meanwhile, and its gate is closed when the next but one is about to end."""
    loop, began = Loop(clock, 10.0, gone), clock.now
    progress = stopped_by(loop, 10.0)
    assert clock.now - began < 31
    assert progress.stop_seconds < long_work.LONG + 0.25
    names = [phase.name for phase in progress.phases]
    assert names == (["quiesce"] if gone == 9.5 else ["quiesce", "prepare", "quiesce"])
    assert len(progress.notes) == len(names) // 2


@pytest.mark.parametrize(("kernels", "are_long"), [(1, True), (20, True), (1000, False)])
def test_whether_kernels_take_seconds(clock: Clock, kernels: int, are_long: bool) -> None:
    loop = cast(HookLink, Loop(clock, 10.0, 2.0, kernels))
    with closed_gates([loop], naming(1), 10.0) as long_kernels:
        assert long_kernels is are_long


def test_work_that_is_not_long_is_waited_for(clock: Clock) -> None:
    progress = stopped_by(Loop(clock, 0.8, 0.1), 10.0)
    assert [phase.name for phase in progress.phases] == ["quiesce"] and not progress.notes


def test_a_kernel_that_never_ends_takes_no_longer_than_the_deadline(clock: Clock) -> None:
    loop, began, progress = Loop(clock, 1e9, 0.0), clock.now, naming(1)
    with pytest.raises(Busy, match=r"within 10 s \(process 1 keeps its GPU busy\)"):
        closed(loop, progress=progress, deadline=10.0)()
    assert loop.open and clock.now - began < 10 + long_work.LONG + 0.1


def test_a_job_is_cancelled_while_long_work_is_awaited(clock: Clock) -> None:
    loop, progress = Loop(clock, 1e9, 0.0), naming(1)
    progress.observer = lambda it: it.cancel() if it.phases[-1].name == "prepare" else None
    with pytest.raises(Cancelled):
        closed(loop, progress=progress, deadline=10.0)()
    assert loop.open


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [(Answer(count(1500)), 1.5), (Answer(b"unknown request", status=1, close=True), 0.0)],
)
def test_an_older_hook_does_not_tell_of_long_work(
    tmp_path: Path, answer: Answer, seconds: float
) -> None:
    """It closes the connection at a request that it does not know: that is one for it alone."""
    with fake_hook(tmp_path, lambda _request: answer) as seen:
        link = HookLink(os.getpid(), tmp_path)
        assert link.unfinished() == seconds and not link.connected
    assert [request.type for request in seen] == [Type.UNFINISHED]


def test_a_cancelled_job_opens_them() -> None:
    links = [Link(1, forever(state(busy=True))), Link(2, after())]
    progress = naming(1, 2)
    progress.cancel()
    with pytest.raises(Cancelled):
        closed(*links, progress=progress)()
    assert all(link.open for link in links)


def test_what_fails_inside_stays_the_error() -> None:
    """Also when a gate does not open: that is told besides, and the other one opens."""
    links = [Link(1, after()), Link(2, after())]
    links[1].cannot_open = Busy("still parked", hint="report this")
    hooks = [cast(HookLink, link) for link in links]
    with pytest.raises(ZeroDivisionError) as raised, closed_gates(hooks, naming(1, 2)):
        raise ZeroDivisionError
    assert [link.open for link in links] == [True, False]
    assert raised.value.__notes__ == ["besides, still parked; report this"]


def test_a_process_that_dies_inside_is_no_error() -> None:
    links = [Link(1, after()), Link(2, after())]
    links[0].cannot_open = NoSuchProcess("it ended", hint="see")
    closed(links[1], links[0])()
    assert links[1].open


def test_with_a_real_link(runtime: Path) -> None:
    """The requests, in order, as a hook sees them."""
    answers = iter([gate(busy=1), gate(settled=1)])

    def script(request: Request) -> Answer:
        if request.type == Type.SEAL_GATE:
            return Answer(count(0))
        return Answer(next(answers) if request.payload else b"")

    with fake_hook(runtime, script) as seen, HookLink(os.getpid(), runtime) as link:
        with closed_gates([link], naming(link.pid)):
            assert [r.type for r in seen] == [4, 4, 18]
        assert [r.type for r in seen] == [4, 4, 18, 8]


def test_no_gate_closes_before_the_journal_names_its_process() -> None:
    """Invariant 3: of two, the one that is named is not stopped either."""
    links = [Link(1, after()), Link(2, after())]
    with pytest.raises(Internal, match=r"gate of process 2 .*\(invariant 3\)") as raised:
        closed(*links, progress=naming(1))()
    assert raised.value.hint
    assert not any(link.told for link in links)


def test_a_part_of_a_job_names_what_the_job_does() -> None:
    operation = naming(1, 2)
    Beside(operation).require_named([1, 2])
    operation.about_to_touch(AffectedSet((), ()))  # the record of the next step
    with pytest.raises(Internal, match="invariant 3"):
        Beside(operation).require_named([1])
