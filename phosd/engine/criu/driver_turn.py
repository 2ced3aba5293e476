"""The driver's turn at a restore: the program's GPU state comes back while CRIU holds the tree."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from phosd.engine.criu.made_processes import MadeProcesses
from phosd.engine.criu.tracers import Tracer, restore_turn
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


class DriverTurn:
    """The driver's turn while CRIU holds the restored tree, in a thread of its own."""

    def __init__(
        self, driver: HeldRestore, tracer: Tracer, before: Callable[[], None], made: MadeProcesses
    ) -> None:
        self.tracer = tracer
        self._driver = driver
        self._before = before
        self._made = made
        self._pool = ThreadPoolExecutor(1)
        self._turn: Future[None] | None = None

    def begin(self) -> None:
        """Wait for CRIU, which has started, beside the caller."""
        self.tracer.started()
        self._turn = self._pool.submit(self._take)

    def require_done(self) -> None:
        """Raise what went wrong; the tree, which is still held, is killed then."""
        assert self._turn is not None
        try:
            self._turn.result(_TURN_ENDS_SECONDS)
        except TimeoutError as error:
            self._made.kill()
            raise Internal(
                "criu restore did not have the driver restore the program",
                hint="somebody with its user's rights has disturbed it; try again",
            ) from error
        except BaseException:
            self._made.kill()
            raise

    def end(self) -> None:
        """Wait for CRIU no longer."""
        self.tracer.leave()
        self._pool.shutdown()

    def _take(self) -> None:
        def threads() -> Mapping[int, int]:
            return self._driver.restore_threads(self.tracer.pids())

        restore_turn([self.tracer], threads, self._restore, lambda: None)

    def _restore(self) -> None:
        self._before()
        self._driver.restore(sorted(self.tracer.pids()))


@contextlib.contextmanager
def driver_turn(
    driver: HeldRestore | None, deadline: float, before: Callable[[], None], made: MadeProcesses
) -> Iterator[DriverTurn | None]:
    if driver is None:
        yield None
        return

    def pids() -> list[int]:
        now = made.ids()
        return [now[pid] for pid in driver.saved if pid in now]

    with Tracer(pids, deadline) as tracer:
        turn = DriverTurn(driver, tracer, before, made)
        try:
            yield turn
        finally:
            turn.end()
