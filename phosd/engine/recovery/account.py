"""Note what was done for each process that is brought back, and why one could not be."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from phosd.errors import PhosError, Timeout


@dataclass
class Account:
    """The results: ``deeds`` by pid, and why processes could not be brought back."""

    deeds: dict[int, list[str]] = field(default_factory=dict)
    failures: dict[int, PhosError] = field(default_factory=dict)

    def text(self, pids: Iterable[int]) -> str:
        """Return a sentence for the history on each of these processes that changed or failed."""
        said = []
        for pid in pids:
            if pid in self.failures:
                said.append(f"process {pid} could not be brought back: {self.failures[pid]}")
            elif deeds := self.deeds.get(pid):
                said.append(f"process {pid} was {' and '.join(deeds)}, and runs again")
        return "; ".join(said)


_Answer = TypeVar("_Answer")


def told(pid: int, found: Mapping[int, _Answer]) -> _Answer:
    """Return what was found out about a process. Raises :class:`Timeout` if it told nothing."""
    try:
        return found[pid]
    except KeyError:
        raise Timeout(
            f"process {pid} does not let itself be looked at",
            hint=f"see what it, or its file system, waits for; then `phos recover {pid}`",
        ) from None


@contextlib.contextmanager
def noted(account: Account, pid: int) -> Iterator[None]:
    try:
        yield
    except PhosError as error:
        account.failures[pid] = error
