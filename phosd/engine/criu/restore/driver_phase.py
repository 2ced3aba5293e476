"""The driver's phase of a restore: the program's GPU state comes back while CRIU holds the tree."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from phosd.engine.criu.restore.restored_processes import RestoredProcesses
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tracers import Tracer, restore_turn
from phosd.errors import Internal

_TURN_ENDS_SECONDS = 10.0
"""How long the driver's turn may take to end here, when CRIU says that it has."""


@dataclass(frozen=True)
class HeldRestore:
    """What the driver does with processes of a restored tree before any of its threads runs but
    their ``restore_threads``, which are by process. ``saved`` are the pids that they were saved
    with, the others those that they have now.
    """

    saved: frozenset[int]
    restore_threads: Callable[[Collection[int]], Mapping[int, int]]
    restore: Callable[[Sequence[int]], None]


class DriverPhase(CriuPart):
    """The driver's work while CRIU holds the restored tree, in a thread of its own.

    ``before`` is called first, in that thread; CRIU may take ``deadline`` seconds.
    """

    def __init__(
        self,
        driver: HeldRestore,
        deadline: float,
        processes: RestoredProcesses,
        before: Callable[[], None],
    ) -> None:
        self._driver = driver
        self._processes = processes
        self._before = before
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(1)
        self._turn: Future[None] | None = None

    def __enter__(self) -> Self:
        self._tracer = Tracer(self._pids, self._deadline)
        return self

    @property
    def descriptors(self) -> Sequence[int]:
        return self._tracer.descriptors

    @property
    def environment(self) -> Mapping[str, str]:
        return self._tracer.environment

    @property
    def plugged(self) -> bool:
        return True

    def started(self) -> None:
        """Wait for CRIU beside the caller."""
        self._tracer.started()
        self._turn = self._pool.submit(self._take)

    def held(self) -> None:
        """Raise what went wrong; the tree, which is still held, is killed then."""
        assert self._turn is not None
        try:
            self._turn.result(_TURN_ENDS_SECONDS)
        except TimeoutError as error:
            self._processes.kill()
            raise Internal(
                "criu restore did not have the driver restore the program",
                hint="somebody with its user's rights has disturbed it; try again",
            ) from error
        except BaseException:
            self._processes.kill()
            raise

    def __exit__(self, *_: object) -> None:
        self._tracer.leave()  # the thread waits for CRIU no longer
        self._pool.shutdown()
        self._tracer.close()

    def _pids(self) -> list[int]:
        now = self._processes.ids()
        return [now[pid] for pid in self._driver.saved if pid in now]

    def _take(self) -> None:
        def threads() -> Mapping[int, int]:
            return self._driver.restore_threads(self._pids())

        restore_turn([self._tracer], threads, self._restore, lambda: None)

    def _restore(self) -> None:
        self._before()
        self._driver.restore(sorted(self._pids()))
