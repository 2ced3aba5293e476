"""Reservations for programs that the driver has off their GPUs: each gets back what it had."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory import reservation as reservation_module
from phosd.engine.memory.reservation import GpuLocks, Reservation, lent_room
from phosd.engine.mover.client.mover import Mover
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, Cancelled, Internal, OutOfMemory, PhosError, Timeout

A, B = 11, 12
SIZES = {A: 300, B: 200}


class Gpu:
    """A GPU that is full, the driver's part in it, and its mover."""

    gpu = 0
    alive = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 0
        self.states = dict.fromkeys(SIZES, State.RUNNING)
        self.reserved: dict[frozenset[ProcessId], int] = {}
        self.before: dict[tuple[str, int], Callable[[], object]] = {}
        self.after: dict[tuple[str, int], Callable[[], object]] = {}
        self._lock = threading.RLock()
        monkeypatch.setattr(driver_checkpoint, "RETRY_PAUSE", 0)
        monkeypatch.setattr(reservation_module, "ROOM", 0)
        monkeypatch.setattr(driver_checkpoint, "state", self.states.get)
        steps: dict[str, tuple[State, State, Callable[[int], object]]] = {
            "lock": (State.RUNNING, State.LOCKED, lambda _: None),
            "checkpoint": (State.LOCKED, State.CHECKPOINTED, lambda pid: self.take(-SIZES[pid])),
            "restore": (State.CHECKPOINTED, State.LOCKED, self._restore),
            "unlock": (State.LOCKED, State.RUNNING, lambda _: None),
        }
        for name, step in steps.items():
            monkeypatch.setattr(driver_checkpoint, name, self._step(name, *step))

    def _step(
        self, name: str, before: State, after: State, act: Callable[[int], object]
    ) -> Callable[..., None]:
        def step(pid: int, _limit: int = 0) -> None:
            self.before.get((name, pid), lambda: None)()
            if self.states[pid] is not before:
                raise Internal(f"{name} of {pid} in state {self.states[pid]}")
            act(pid)
            self.states[pid] = after
            self.after.get((name, pid), lambda: None)()

        return step

    def _restore(self, pid: int) -> None:
        try:
            self.take(SIZES[pid])
        except OutOfMemory:
            self.states[pid] = State.FAILED
            raise

    def take(self, size: int) -> None:
        with self._lock:
            if size > self.free:
                raise OutOfMemory(f"{size} bytes of {self.free}")
            self.free -= size

    def free_memory(self) -> tuple[int, int]:
        return self.free, 1000

    def reserve(self, size: int, processes: Collection[ProcessId]) -> None:
        with self._lock:
            self.take(size)
            self.reserved[frozenset(processes)] = size

    def unreserve(self, processes: Collection[ProcessId]) -> None:
        with self._lock:
            self.free += self.reserved.pop(frozenset(processes), 0)

    def lend_room(self) -> None:
        pass

    def keep_room(self) -> None:
        pass

    def kept(self, pid: int) -> int:
        """Bytes that are kept for a process."""
        return self.reserved.get(frozenset({ProcessId(pid, 0)}), 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def gpu_locks() -> GpuLocks:
    return GpuLocks()


@pytest.fixture
def reservation(gpu: Gpu, gpu_locks: GpuLocks) -> Callable[..., Reservation]:
    def make(pid: int, progress: Progress | None = None, limit: float | None = None) -> Reservation:
        movers = [cast(Mover, gpu)]
        return Reservation(gpu_locks, movers, {ProcessId(pid, 0)}, progress or Progress(), limit)

    return make


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def test_two_leave_at_once(
    gpu: Gpu, gpu_locks: GpuLocks, reservation: Callable[..., Reservation], pool: ThreadPoolExecutor
) -> None:
    """Neither is given what the other has set free."""
    about_to, gone, stopped = (threading.Barrier(2) for _ in range(3))
    kept: dict[int, int] = {}

    def meet(barrier: threading.Barrier) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # the other has to wait
            barrier.wait(0.3)

    for pid in SIZES:
        gpu.before["checkpoint", pid] = partial(meet, about_to)
        gpu.after["checkpoint", pid] = partial(meet, gone)

    def go(pid: int) -> None:
        with driver_checkpoint.checkpointed([pid], reservation(pid)):
            stopped.wait(10)
            kept[pid] = gpu.kept(pid)
            stopped.wait(10)

    list(pool.map(go, SIZES))
    assert kept == SIZES
    assert set(gpu.states.values()) == {State.RUNNING}
    assert (gpu.free, gpu.reserved) == (0, {})
    assert gpu_locks.acquire({0})


def test_one_comes_back_while_another_leaves(
    gpu: Gpu, reservation: Callable[..., Reservation], pool: ThreadPoolExecutor
) -> None:
    """What is given to the one is not kept for the other."""
    leaving, coming, kept, end = (threading.Event() for _ in range(4))

    def leave() -> None:
        with driver_checkpoint.checkpointed([B], reservation(B)):
            kept.set()
            end.wait(10)

    def gone() -> None:
        leaving.set()
        coming.wait(0.3)

    def come() -> None:
        coming.set()
        kept.wait(0.3)

    gpu.after["checkpoint", B] = gone
    gpu.before["restore", A] = come
    with driver_checkpoint.checkpointed([A], reservation(A)):
        other = pool.submit(leave)
        assert leaving.wait(10)
    assert kept.wait(10)
    assert (gpu.states[A], gpu.kept(B)) == (State.RUNNING, SIZES[B])
    end.set()
    other.result()
    assert gpu.states[B] is State.RUNNING


def test_what_others_do_before_the_lock_holds_does_not_count(
    gpu: Gpu, reservation: Callable[..., Reservation]
) -> None:
    """A neighbour allocates while the first try of the lock waits."""
    gpu.free = 100
    tries: list[None] = []

    def time_out_once() -> None:
        tries.append(None)
        if len(tries) == 1:
            gpu.take(100)
            raise Timeout("no safe point", hint="try again")

    gpu.before["lock", A] = time_out_once
    with driver_checkpoint.checkpointed([A], reservation(A)):
        assert gpu.kept(A) == SIZES[A]


def test_nobody_leaves_a_gpu_that_has_no_room_for_the_driver(
    gpu: Gpu,
    gpu_locks: GpuLocks,
    reservation: Callable[..., Reservation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the driver cannot save once for want of room, it never saves."""
    monkeypatch.setattr(reservation_module, "ROOM", 50)
    gpu.free = 49
    gpu.before["checkpoint", A] = partial(pytest.fail, "the driver was asked")
    with (
        pytest.raises(OutOfMemory, match="GPU 0"),
        driver_checkpoint.checkpointed([A], reservation(A)),
    ):
        pytest.fail("it was taken off the GPU")
    assert gpu.states[A] is State.RUNNING
    assert gpu_locks.acquire({0})


def test_who_waits_for_others_runs(
    gpu: Gpu, gpu_locks: GpuLocks, reservation: Callable[..., Reservation], pool: ThreadPoolExecutor
) -> None:
    assert gpu_locks.acquire({0, 1})
    waited = threading.Event()
    gpu.after["unlock", A] = waited.set

    def go() -> None:
        with driver_checkpoint.checkpointed([A], reservation(A)):
            assert gpu.kept(A) == SIZES[A]

    job = pool.submit(go)
    try:
        assert waited.wait(5)
        time.sleep(0.1)
        assert gpu.states[A] is State.RUNNING
        assert not job.done()
    finally:
        gpu_locks.release({0, 1})
    job.result()


@pytest.mark.parametrize(("limit", "error"), [(0.1, Busy), (None, Cancelled)])
def test_it_waits_as_long_as_it_may(
    limit: float | None,
    error: type[PhosError],
    gpu: Gpu,
    gpu_locks: GpuLocks,
    reservation: Callable[..., Reservation],
) -> None:
    assert gpu_locks.acquire({0})
    progress = Progress()
    if error is Cancelled:
        threading.Timer(0.1, progress.cancel).start()
    with pytest.raises(error), driver_checkpoint.checkpointed([A], reservation(A, progress, limit)):
        pytest.fail("it is another's turn")
    assert gpu.states[A] is State.RUNNING
    assert not gpu_locks.acquire({0})
    gpu_locks.release({0})
    assert gpu_locks.acquire({0})


def test_a_failure_half_way(
    gpu: Gpu, gpu_locks: GpuLocks, reservation: Callable[..., Reservation]
) -> None:
    """One has left, the other has not: nobody takes the room of the first meanwhile."""

    def fail() -> None:
        while gpu.states[A] is not State.CHECKPOINTED:
            time.sleep(0.01)
        raise Internal("no checkpoint")

    gpu.before["checkpoint", B] = fail
    gpu.before["restore", A] = lambda: gpu_locks.acquire({0}) and pytest.fail("others may come")
    with (
        pytest.raises(Internal, match="no checkpoint"),
        driver_checkpoint.checkpointed([A, B], reservation(A)),
    ):
        pytest.fail("one has not left")
    assert set(gpu.states.values()) == {State.RUNNING}
    assert gpu_locks.acquire({0})


def test_who_stays_away_needs_no_room(
    gpu: Gpu, gpu_locks: GpuLocks, reservation: Callable[..., Reservation]
) -> None:
    kept = reservation(A)
    with Undo() as undo:
        driver_checkpoint.stop([A], kept, undo)
        undo.forget()
    assert gpu.kept(A) == SIZES[A]
    kept.release()
    assert (gpu.free, gpu.reserved) == (SIZES[A], {})
    assert gpu.states[A] is State.CHECKPOINTED
    assert gpu_locks.acquire({0})


class Lender:
    """A mover that fails at a step."""

    gpu = 3

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.asked: list[str] = []

    def lend_room(self) -> None:
        self._answer("lend")

    def keep_room(self) -> None:
        self._answer("keep")

    def _answer(self, step: str) -> None:
        self.asked.append(step)
        if step == self.fails:
            raise Internal("its driver does not answer")


@pytest.mark.parametrize("fails", ["lend", "keep", ""])
def test_a_move_does_not_depend_on_who_lends_room(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The processes may have arrived: an error then would have half of it undone."""
    broken, whole = Lender(fails), Lender("")
    with lent_room(cast(list[Mover], [broken, whole])):
        assert (broken.asked, whole.asked) == (["lend"], ["lend"])
    assert (broken.asked, whole.asked) == (["lend", "keep"], ["lend", "keep"])
    assert ("GPU 3: its driver does not answer" in caplog.text) == bool(fails)
    with pytest.raises(ZeroDivisionError), lent_room(cast(list[Mover], [broken])):
        raise ZeroDivisionError
    assert broken.asked[-1] == "keep"
