"""Start the data movers of this node, one per GPU, on demand or ahead, and end them."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from phosd.engine.digest import DigestKey
from phosd.engine.job.progress import Progress
from phosd.engine.memory.reservation import GpuLocks
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.standby import Standby
from phosd.engine.mover.protocol import endpoint
from phosd.engine.node.claims import Claims

_THREADS = 64
_R = TypeVar("_R")
_log = logging.getLogger(__name__)


class Movers:
    """Movers with rings of ``ring_bytes`` (None: their own choice), in ``runtime_dir``.

    ``needed`` returns the GPUs on which memory is kept between jobs. Safe to use from several
    threads.
    """

    def __init__(
        self,
        runtime_dir: Path,
        ring_bytes: int | None,
        key: DigestKey,
        claims: Claims,
        needed: Callable[[], set[int]],
    ) -> None:
        self.ring_bytes = ring_bytes
        self._runtime_dir = runtime_dir
        self._key = key
        self._claims = claims
        self._needed = needed
        self._movers: dict[int, Future[Mover]] = {}
        self._standbys: dict[int, Future[Standby]] = {}
        self._with_standby: frozenset[int] = frozenset()
        self._starting = ThreadPoolExecutor(_THREADS, "movers")
        self._copying = GpuLocks()
        self._lock = threading.Lock()
        claims.when_idle = self._fill

    def close(self) -> None:
        """End all movers, and what stands by. A later use starts movers again."""
        with self._lock:
            self._with_standby = frozenset()
            while self._standbys:
                if standby := _result(self._standbys.popitem()[1]):
                    standby.end()
            while self._movers:
                if mover := _result(self._movers.popitem()[1]):
                    mover.close()

    def pids(self) -> set[int]:
        """Return the pids of the movers, also of those that an earlier phosd has left."""
        with self._lock:
            ours = {mover.pid for each in self._movers.values() if (mover := _started(each))}
        return ours | endpoint.listeners(self._runtime_dir)

    def running(self, gpus: Collection[int]) -> list[Mover]:
        """Return those movers of these GPUs that have been started."""
        with self._lock:
            return [
                mover
                for gpu, each in self._movers.items()
                if gpu in gpus and (mover := _started(each))
            ]

    def mover(self, gpu: int) -> Mover:
        """Return the mover of a GPU; start it at its first use, and again if it died."""
        return self._begun(gpu).result()

    def begin(self, gpus: Iterable[int]) -> None:
        """Begin to start the movers of these GPUs, all at once. Whoever needs one then waits for
        what is left of its start, and is told why it failed.
        """
        for gpu in gpus:
            self._begun(gpu)

    def keep_standbys(self, gpus: Iterable[int]) -> None:
        """From now on have a process stand by for each of these GPUs that has no mover, to become
        it. It is started, and replaced, when no job works on a process.
        """
        with self._lock:
            self._with_standby = frozenset(gpus)
        self._fill()

    def _begun(self, gpu: int) -> Future[Mover]:
        """Return the mover of a GPU, which may still be starting."""
        with self._lock:
            known = self._movers.get(gpu)
            if known is not None and not known.done():
                return known
            mover = None if known is None else _result(known)
            if known is None or mover is None or not mover.alive:
                if mover is not None:
                    del self._movers[gpu]  # the next may not start
                    mover.close()
                standby = self._standbys.pop(gpu, None)
                known = self._movers[gpu] = self._starting.submit(self._start, gpu, standby)
            return known

    def _start(self, gpu: int, standing_by: Future[Standby] | None) -> Mover:
        standby = None if standing_by is None else _result(standing_by)
        try:
            child = standby.child if standby is not None and standby.alive else None
            mover = Mover.start(gpu, self.ring_bytes, self._key, self._runtime_dir, child)
        finally:
            if standby is not None:
                standby.release()
        mover.keep_room()
        return mover

    def _fill(self) -> None:
        """Begin to start the processes that are to stand by and do not."""
        with self._lock:
            if not self._claims.only(()):
                return  # the end of the job comes here again
            for gpu in self._with_standby:
                mover, standby = self._movers.get(gpu), self._standbys.get(gpu)
                if mover is not None and (not mover.done() or _alive(mover)):
                    continue
                if standby is not None and (not standby.done() or _alive(standby)):
                    continue
                if standby is not None and (dead := _result(standby)):
                    dead.release()
                self._standbys[gpu] = self._starting.submit(self._stand_by, gpu)

    def _stand_by(self, gpu: int) -> Standby:
        try:
            return Standby.start(gpu, self.ring_bytes, self._runtime_dir)
        except Exception as error:
            _log.warning("nothing stands by for the data mover of GPU %d: %s", gpu, error)
            raise

    def turn_to_copy(
        self, gpus: Collection[int], progress: Progress
    ) -> AbstractContextManager[None]:
        """Return a context inside which no other job copies between these GPUs and the host.

        Enter it before the program stops and before :attr:`Node.gpu_locks`. Raises
        :class:`Cancelled`.
        """
        where = ", ".join(map(str, sorted(gpus)))
        waiting = f"the memory of another program on GPU {where} is copied first"
        return self._copying.locked(gpus, progress, waiting=waiting)

    def leave(self, gpus: Iterable[int], pids: Iterable[int]) -> None:
        """End the movers of those GPUs on which no memory is kept, so that phosd uses them no more.

        Does nothing if a job works on processes other than ``pids``.
        """
        with self._lock:
            if not self._claims.only(pids):
                return
            for gpu in {*gpus} - self._needed():
                known = self._movers.pop(gpu, None)
                if known is not None and (mover := _result(known)):
                    mover.close()


def _result(start: Future[_R]) -> _R | None:
    """Return what was started, once it is; None if it failed, which others are told."""
    return None if start.exception() is not None else start.result()


def _started(start: Future[_R]) -> _R | None:
    """Return what was started, if it is ready."""
    return _result(start) if start.done() else None


def _alive(start: "Future[Mover] | Future[Standby]") -> bool:
    return start.done() and start.exception() is None and start.result().alive
