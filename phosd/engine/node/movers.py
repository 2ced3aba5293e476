"""Start the data movers of this node, one per GPU, on demand, and end them."""

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from phosd.engine.digest import DigestKey
from phosd.engine.job.progress import Progress
from phosd.engine.memory.reservation import GpuLocks
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.protocol import endpoint
from phosd.engine.node.claims import Claims


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
        self._movers: dict[int, Mover] = {}
        self._copying = GpuLocks()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End all movers."""
        with self._lock:
            while self._movers:
                self._movers.popitem()[1].close()

    def pids(self) -> set[int]:
        """Return the pids of the movers, also of those that an earlier phosd has left."""
        with self._lock:
            ours = {mover.pid for mover in self._movers.values()}
        return ours | endpoint.listeners(self._runtime_dir)

    def running(self, gpus: Collection[int]) -> list[Mover]:
        """Return those movers of these GPUs that have been started."""
        with self._lock:
            return [mover for gpu, mover in self._movers.items() if gpu in gpus]

    def mover(self, gpu: int) -> Mover:
        """Return the mover of a GPU; start it at its first use, and again if it died."""
        with self._lock:
            mover = self._movers.get(gpu)
            if mover is None or not mover.alive:
                if mover is not None:
                    del self._movers[gpu]  # the next may not start
                    mover.close()
                mover = self._movers[gpu] = Mover.start(
                    gpu, self.ring_bytes, self._key, self._runtime_dir
                )
                mover.keep_room()
            return mover

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
                if mover := self._movers.pop(gpu, None):
                    mover.close()
