"""What recovery does with processes some of which the driver had moved when phosd was killed."""

from pathlib import Path

import pytest

from phosd.engine.job.affected import AffectedProcess, AffectedSet
from phosd.engine.job.journal import JobRecord
from phosd.engine.program import driver_checkpoint, process_gpus
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.recovery import from_driver, guarded
from phosd.engine.recovery.account import Account
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import OutOfMemory

FIRST, SECOND = 11, 12


def record(moves: dict[int, int]) -> JobRecord:
    touched = tuple(AffectedProcess(pid, 1, gpu=True, hooked=True) for pid in (FIRST, SECOND))
    affected = AffectedSet(touched, (0, 1), moves=moves)
    return JobRecord(1, "migrate", str(FIRST), 0, 0.0, "this boot", FIRST, 1, affected)


@pytest.mark.parametrize(
    ("states", "moves", "follow"),
    [
        ((State.LOCKED, State.CHECKPOINTED), {0: 1}, [SECOND]),
        ((State.CHECKPOINTED, State.RUNNING), {0: 1}, [FIRST]),
        ((State.CHECKPOINTED, State.CHECKPOINTED), {0: 1}, []),
        ((State.LOCKED, State.LOCKED), {0: 1}, []),
        ((State.LOCKED, State.CHECKPOINTED), {}, []),
        ((None, State.CHECKPOINTED), {0: 1}, []),
    ],
    ids=["one moved", "one runs", "none moved", "all moved", "not begun", "one ended"],
)
def test_who_belongs_together_moves_together(
    states: tuple[State | None, State | None],
    moves: dict[int, int],
    follow: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = dict(zip((FIRST, SECOND), states, strict=True))
    moved: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(driver_checkpoint, "state", known.get)
    monkeypatch.setattr(
        driver_checkpoint, "move", lambda pids, to: moved.extend((p, to) for p in pids)
    )
    monkeypatch.setattr(process_gpus, "gpu_uuids", lambda: ["GPU-0", "GPU-1"])
    account = Account()
    stopped = [pid for pid, state in known.items() if state in (State.LOCKED, State.CHECKPOINTED)]
    from_driver._finish_moves(stopped, [record(moves)], account)
    assert moved == [(pid, [1, 0]) for pid in follow]
    assert not account.failures


@pytest.mark.parametrize("moves", [{0: 1}, {}], ids=["moved", "not begun"])
def test_nobody_follows_who_does_not_tell_where_they_are(
    moves: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {SECOND: State.CHECKPOINTED}
    monkeypatch.setattr(driver_checkpoint, "states", lambda pids, seconds: told)
    monkeypatch.setattr(procfs, "process_id", lambda pid: ProcessId(pid, 1))
    account = Account()
    unclear = from_driver._unclear([SECOND], [record(moves)], account)
    assert unclear == account.failures.keys() == ({SECOND} if moves else set())


def test_who_could_not_follow_is_not_brought_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it shares with the others would be two memories then."""
    states = {FIRST: State.RUNNING, SECOND: State.CHECKPOINTED}
    monkeypatch.setattr(driver_checkpoint, "states", lambda pids, seconds=0: states)
    monkeypatch.setattr(driver_checkpoint, "move", _no_room)
    monkeypatch.setattr(process_gpus, "gpu_uuids", lambda: ["GPU-0", "GPU-1"])
    brought: list[int] = []

    def bring(pids: list[int]) -> dict[int, None]:
        brought.extend(pids)
        return {}

    monkeypatch.setattr(driver_checkpoint, "back_to_locked", bring)
    monkeypatch.setattr(driver_checkpoint, "back_to_running", bring)
    account = Account()
    everyone = [ProcessId(FIRST, 1), ProcessId(SECOND, 1)]
    with guarded.GuardingMovers(Path("/nowhere")) as movers:
        jobs, stopped = [record({0: 1})], StoppedProcesses(Path("/nowhere"))
        from_driver.back_from_driver(everyone, everyone, movers, jobs, stopped, account)
    assert not brought
    assert isinstance(account.failures[SECOND], OutOfMemory)


def _no_room(pids: list[int], to: list[int]) -> None:
    raise OutOfMemory("GPU 1 is full", hint="free some memory")


def test_whose_room_is_given_back() -> None:
    """A mover releases the room of a group only as a whole."""
    first, second, other = (ProcessId(pid, 1) for pid in (FIRST, SECOND, 13))
    known = record({})
    elsewhere = JobRecord(2, "suspend", "13", 0, 0.0, "this boot", 13, 1, AffectedSet((), (0,)))
    everyone = [first, second, other]
    assert from_driver._rooms([FIRST], everyone, [known, elsewhere]) == [first, second]
    assert from_driver._rooms([FIRST], everyone, [elsewhere]) == everyone
    assert from_driver._rooms([FIRST, 13], everyone, [known, elsewhere]) == everyone
