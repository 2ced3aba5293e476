"""What the engine still holds of programs' device memory between their jobs."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import Holdings
from phosd.engine.node.movers import Movers
from phosd.engine.program.group import Identity, Unit


class KeptMemory:
    """Holdings by the processes whose memory they are. Safe to use from several threads."""

    def __init__(self, movers: Movers) -> None:
        self._movers = movers
        self._kept: dict[Identity, Holdings] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of everything."""
        self._close_kept(lambda _: True)

    def let_go_of_the_dead(self) -> None:
        """Let go of what processes had that have ended."""
        self._close_kept(lambda _: False)

    def gpus(self) -> set[int]:
        """Where something is kept."""
        with self._lock:
            return {mover.gpu for kept in self._kept.values() for mover in kept.movers()}

    @contextlib.contextmanager
    def held(self, unit: Unit) -> Iterator[Holdings]:
        """What the engine holds of the unit's memory. Afterwards it is kept for the next job, if it
        is known what the processes free.
        """
        identity = unit.identity
        holdings = self._take_kept(unit) or Holdings(
            self._movers, {m.pid: m.gpus for m in unit.members}
        )
        with self.keeping(identity, holdings):
            holdings.revive()
            yield holdings

    @contextlib.contextmanager
    def keeping(self, identity: Identity, holdings: Holdings) -> Iterator[None]:
        """What a job has made of these processes' memory is kept afterwards for the next, as
        :meth:`held` keeps it.
        """
        with Undo() as undo:
            undo.add(self._keep, identity, holdings)
            yield

    def let_go(self, unit: Unit) -> None:
        """Keep nothing of these processes."""
        if holdings := self._take_kept(unit):
            holdings.close()

    def _keep(self, identity: Identity, holdings: Holdings) -> None:
        if not holdings.watched:
            holdings.close()
            return
        with self._lock:
            self._kept[identity] = holdings

    def _take_kept(self, unit: Unit) -> Holdings | None:
        """What is kept of just these processes. What is kept of some of them and of others is let
        go of: it belonged to a unit that is no more.
        """
        pids = set(unit.gpu_pids)
        with self._lock:
            same = self._kept.pop(unit.identity, None)
        self._close_kept(lambda identity: any(pid in pids for pid, _ in identity))
        return same

    def _close_kept(self, unwanted: Callable[[Identity], bool]) -> None:
        """Let go of what is kept of some processes, and of those that have ended."""
        with self._lock:
            keys = [key for key, kept in self._kept.items() if unwanted(key) or not kept.watched]
            others = [self._kept.pop(key) for key in keys]
        for holdings in others:
            holdings.close()
