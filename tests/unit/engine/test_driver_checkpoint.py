"""The driver's checkpoint of several processes: whatever fails, the others run on."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.memory.reservation import GpuLocks, Reservation
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.system.cuda import driver
from phosd.errors import Internal, NoSuchProcess, PhosError, Timeout

PIDS = [11, 12, 13]


class FakeDriver:
    """The driver's state machine for some processes; a step in ``broken`` fails for a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: dict[int, State | None] = dict.fromkeys(PIDS, State.RUNNING)
        self.broken: dict[tuple[str, int], Callable[[], None]] = {}
        self.calls: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        steps = {
            "lock": (State.RUNNING, State.LOCKED),
            "checkpoint": (State.LOCKED, State.CHECKPOINTED),
            "restore": (State.CHECKPOINTED, State.LOCKED),
            "unlock": (State.LOCKED, State.RUNNING),
        }
        monkeypatch.setattr(driver_checkpoint, "state", self.states.get)
        monkeypatch.setattr(driver_checkpoint, "RETRY_PAUSE", 0)
        for name, (before, after) in steps.items():
            monkeypatch.setattr(driver_checkpoint, name, self._step(name, before, after))

    def _step(self, name: str, before: State, after: State) -> Callable[[int], None]:
        def step(pid: int, _limit: int = 0) -> None:
            with self._lock:
                self.calls.append((name, pid))
                if (name, pid) in self.broken:
                    self.broken[name, pid]()
                if self.states[pid] is not before:
                    raise Internal(f"{name} of {pid} in state {self.states[pid]}")
                self.states[pid] = after

        return step

    def dies(self, pid: int) -> None:
        self.states[pid] = None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


def checkpointed(pids: Sequence[int]) -> AbstractContextManager[object]:
    """Checkpointed processes whose memory no mover reserves."""
    return driver_checkpoint.checkpointed(pids, Reservation(GpuLocks(), (), (), Progress()))


def refuse() -> None:
    raise Timeout("no safe point", hint="try again")


def test_all_are_checkpointed_inside_and_run_afterwards(fake: FakeDriver) -> None:
    with checkpointed(PIDS):
        assert set(fake.states.values()) == {State.CHECKPOINTED}
    assert set(fake.states.values()) == {State.RUNNING}


@pytest.mark.parametrize("pid", PIDS)
@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_step_before_the_stop_fails(fake: FakeDriver, step: str, pid: int) -> None:
    fake.broken[step, pid] = refuse
    with pytest.raises(Timeout, match="no safe point") as raised, checkpointed(PIDS):
        pytest.fail("one of them is not checkpointed")
    assert set(fake.states.values()) == {State.RUNNING}
    assert not getattr(raised.value, "__notes__", ())


@pytest.mark.parametrize("pid", PIDS)
def test_a_lock_that_was_set_and_answered_with_an_error(fake: FakeDriver, pid: int) -> None:
    def lock_and_fail() -> None:
        fake.states[pid] = State.LOCKED
        refuse()

    fake.broken["lock", pid] = lock_and_fail
    with pytest.raises(Timeout), checkpointed(PIDS):
        pytest.fail("one of them is not checkpointed")
    assert set(fake.states.values()) == {State.RUNNING}


def test_between_two_tries_of_a_lock_all_run(fake: FakeDriver) -> None:
    """What one of them waits for may be what another was kept from launching."""
    tries: list[set[State | None]] = []

    def time_out_once() -> None:
        tries.append({fake.states[other] for other in PIDS})
        if len(tries) == 1:
            refuse()

    fake.broken["lock", 11] = time_out_once
    fake.broken["lock", 12] = lambda: refuse() if len(tries) == 1 else None
    fake.broken["lock", 13] = lambda: refuse() if len(tries) == 2 else None
    with checkpointed(PIDS):
        assert set(fake.states.values()) == {State.CHECKPOINTED}
    assert tries == [{State.RUNNING}] * 3


@pytest.mark.parametrize("pid", PIDS)
@pytest.mark.parametrize("step", ["restore", "unlock"])
def test_one_cannot_be_brought_back(fake: FakeDriver, step: str, pid: int) -> None:
    """The others are; and the error of the job itself is still the first."""
    fake.broken[step, pid] = refuse
    with pytest.raises(Timeout), checkpointed(PIDS):
        pass
    assert {fake.states[other] for other in PIDS if other != pid} == {State.RUNNING}
    fake.states.update(dict.fromkeys(PIDS, State.RUNNING))
    with pytest.raises(ZeroDivisionError) as raised, checkpointed(PIDS):
        raise ZeroDivisionError
    assert any("no safe point" in note for note in raised.value.__notes__)
    assert {fake.states[other] for other in PIDS if other != pid} == {State.RUNNING}


def test_one_that_the_driver_lost_is_told(fake: FakeDriver) -> None:
    with pytest.raises(Internal, match="process 12 back: it is lost"), checkpointed(PIDS):
        fake.states[12] = State.FAILED
    assert [fake.states[11], fake.states[13]] == [State.RUNNING] * 2
    assert ("restore", 12) not in fake.calls


@pytest.mark.parametrize("pid", PIDS)
def test_one_that_dies_is_told_and_left_alone(fake: FakeDriver, pid: int) -> None:
    with pytest.raises(NoSuchProcess, match=f"process {pid} ended"), checkpointed(PIDS):
        fake.dies(pid)
    assert {fake.states[other] for other in PIDS if other != pid} == {State.RUNNING}


def test_resume_tries_every_process(fake: FakeDriver) -> None:
    fake.states.update(dict.fromkeys(PIDS, State.CHECKPOINTED))
    fake.broken["restore", 11] = refuse
    fake.broken["unlock", 13] = refuse
    with pytest.raises(PhosError, match="besides, no safe point"):
        driver_checkpoint.resume(PIDS)
    assert fake.states == {11: State.CHECKPOINTED, 12: State.RUNNING, 13: State.LOCKED}


def test_of_nobody(fake: FakeDriver) -> None:
    with checkpointed([]):
        driver_checkpoint.resume([])
    assert not fake.calls


@pytest.mark.parametrize("stays", [None, 11])
def test_those_who_arrived_leave_again_when_not_all_could_move(
    stays: int | None, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, and at once; who cannot leave is not asked to come back."""
    moves: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def move(pids: Sequence[int], to: Sequence[int]) -> None:
        moves.append((tuple(pids), tuple(to)))
        for pid in pids:
            if len(moves) > 1 or pid != 13:
                fake.states[pid] = State.LOCKED
        if len(moves) == 1:
            raise Timeout("one cannot move", hint="try again")

    monkeypatch.setattr(driver_checkpoint, "move", move)
    reservation = Reservation(GpuLocks(), (), (), Progress())
    with (
        pytest.raises(Timeout, match="cannot move") as raised,
        driver_checkpoint.checkpointed(PIDS, reservation) as bring,
    ):
        if stays is not None:
            fake.broken["checkpoint", stays] = refuse
        fake.calls.clear()
        try:
            bring([1, 2, 0])
        finally:
            assert fake.calls == [("checkpoint", 11), ("checkpoint", 12)]
            away = {pid for pid in PIDS if fake.states[pid] is State.CHECKPOINTED}
            assert away == {11, 12, 13} - {stays}
    assert moves == [((11, 12, 13), (1, 2, 0)), (tuple(sorted(away - {13})), (2, 0, 1))]
    assert set(fake.states.values()) == {State.RUNNING}
    notes = getattr(raised.value, "__notes__", [])
    assert [("no safe point" in note) for note in notes] == ([True] if stays else [])


def test_a_driver_that_does_not_tell_a_state(fake: FakeDriver) -> None:
    """Neither "it runs" nor "it is no GPU process": nobody may rely on either."""
    fake.states[12] = State.UNKNOWN
    back = driver_checkpoint.back_to_running(PIDS)
    assert [pid for pid, error in back.items() if error is not None] == [12]
    assert "does not tell the state of process 12" in str(back[12])
    assert fake.calls == [], "nothing is asked of it blindly"


@pytest.mark.parametrize(
    ("status", "known"),
    [
        ("CUDA_ERROR_NOT_INITIALIZED", None),
        ("CUDA_ERROR_INVALID_VALUE", None),
        ("CUDA_ERROR_UNKNOWN", State.UNKNOWN),
        ("CUDA_ERROR_OPERATING_SYSTEM", State.UNKNOWN),
    ],
)
def test_what_the_driver_says_of_a_process(
    status: str, known: State | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = driver()
    answer = (getattr(bindings.CUresult, status), None)
    monkeypatch.setattr(bindings, "cuCheckpointProcessGetState", lambda pid: answer)
    assert driver_checkpoint.state(os.getpid()) is known
    assert driver_checkpoint.state(2**22 + 5) is None, "who has ended is no GPU process"
