"""Ask the movers of a runtime folder for the memory that they guard, and make them let go of it."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Self

from phosd.engine.mover.client.rescue_client import RescueClient, rescue_clients
from phosd.engine.recovery.account import _Answer
from phosd.engine.system.procfs import ProcessId
from phosd.errors import PhosError

_log = logging.getLogger(__name__)


class GuardingMovers:
    """The movers of a runtime folder. Use it as a context.

    A mover that fails to answer is left out from then on, with its error in ``silent``: what it
    guards is unknown, but nobody whose memory others have is to wait for it.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.silent: list[PhosError] = []
        self._clients = rescue_clients(runtime_dir, self.silent)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for client in self._clients:
            self._opened.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def ask_each(self, ask: Callable[[RescueClient], _Answer]) -> list[tuple[int, _Answer]]:
        """Return the answers, each with the ordinal of the mover's GPU."""
        answers = []
        for client in list(self._clients):
            try:
                answers.append((client.gpu, ask(client)))
            except PhosError as error:
                _log.error("%s", error)
                self.silent.append(error)
                self._clients.remove(client)
        return answers

    def let_go(self, processes: Collection[ProcessId]) -> None:
        """Ask them to release all memory that they guard or reserve for these processes."""
        if not processes:
            return  # movers refuse to reserve for nobody
        self.ask_each(lambda mover: mover.unguard(processes))
        self.ask_each(lambda mover: mover.unreserve(processes))

    def guarded(self) -> dict[ProcessId, dict[int, dict[int, int]]]:
        """Return the guarded blocks: descriptors by process, GPU and block, open until the end of
        the context. Processes for which only device memory is reserved have no blocks.
        """
        found: dict[ProcessId, dict[int, dict[int, int]]] = {}
        for gpu, memory in self.ask_each(RescueClient.parked):
            for each, blocks in memory.items():
                for descriptor in blocks.values():
                    self._opened.callback(os.close, descriptor)
                found.setdefault(each, {})[gpu] = blocks
        return found


def left_parked(runtime_dir: Path) -> set[ProcessId]:
    """Return the processes for which a mover guards memory or keeps a reservation."""
    with GuardingMovers(runtime_dir) as movers:
        return {*movers.guarded()}


def kept_for(processes: Collection[ProcessId], runtime_dir: Path) -> bool:
    """Return whether a mover guards memory of one of these. Raises if a mover does not answer."""
    with GuardingMovers(runtime_dir) as movers:
        memory = movers.guarded()
        found = any(any(memory.get(each, {}).values()) for each in processes)
        if movers.silent and not found:
            raise movers.silent[0]
        return found


def let_rest(processes: Collection[ProcessId], runtime_dir: Path) -> None:
    """Ask the movers to release all memory of these processes, which are suspended."""
    if not processes:
        return
    with GuardingMovers(runtime_dir) as movers:
        movers.let_go(processes)
