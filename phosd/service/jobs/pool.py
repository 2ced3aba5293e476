"""A pool: programs of one image that are there before somebody asks for them."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import msgspec

from phosd.engine.image.called import Called
from phosd.engine.system.procfs import ProcessId
from phosd.errors import InvalidOption
from phosd.service.jobs.options import PoolRequest


class Pool(msgspec.Struct, frozen=True):
    """``hollow`` programs of ``image`` wait to be started for user id ``owner``, and ``ready`` more
    with their memory on the GPUs. There are no more than ``most``, with those that were started.
    """

    name: str
    owner: int
    image: str
    hollow: int = 1
    most: int = 8
    called: Called = Called()
    ready: int = 0

    @property
    def waiting(self) -> int:
        """How many are to wait."""
        return self.hollow + self.ready

    def scaled(self, request: PoolRequest) -> Self:
        """Return the pool as the request wants it, which keeps what it does not say. Raises
        :class:`InvalidOption` if more are to wait than there may be.
        """
        found = msgspec.structs.replace(
            self,
            hollow=self.hollow if request.hollow is None else request.hollow,
            ready=self.ready if request.ready is None else request.ready,
            most=self.most if request.max is None else request.max,
        )
        if found.waiting > found.most:
            raise InvalidOption(
                f"{found.waiting} programs cannot wait where there may be {found.most} in all",
                hint="raise max, or let fewer wait",
            )
        return found

    def row(self) -> dict[str, Any]:
        """Return the pool as a row of the history."""
        return {
            "name": self.name,
            "owner": self.owner,
            "image": self.image,
            "hollow": self.hollow,
            "most": self.most,
            "called_name": self.called.name,
            "within": self.called.within,
            "ready": self.ready,
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a pool from a row."""
        called = Called(row["called_name"] or "", row["within"] or "")
        return cls(
            *(row["name"], row["owner"], row["image"], row["hollow"], row["most"]),
            called=called,
            ready=row["ready"],
        )


class PoolCounts(NamedTuple):
    """Programs of pools: those that wait hollow, those that wait ready, those that were started,
    and how many more are to wait.
    """

    waiting: int = 0
    ready: int = 0
    running: int = 0
    missing: int = 0


class Member(msgspec.Struct, frozen=True):
    """A program of a pool. ``suspension`` is the image of the suspension in which it waits to be
    started; empty: it was started.
    """

    process: ProcessId
    suspension: str = ""
