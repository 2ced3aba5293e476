"""A pool: programs of one image that are there before somebody asks for them."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self

import msgspec

from phosd.engine.image.called import Called
from phosd.engine.system.procfs import ProcessId
from phosd.errors import InvalidOption
from phosd.service.config_values import about
from phosd.service.jobs.options import PoolRequest

POOL_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}"
NAMED = "up to 32 letters, digits, and any of `_ -`, with a letter or digit first"
"""What a pool may be called, as a pattern and in words."""


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
    stated: bool = False
    """Whether ``phosd.toml`` says what it is, and nobody else."""

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
            "stated": int(self.stated),
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a pool from a row."""
        called = Called(row["called_name"] or "", row["within"] or "")
        return cls(
            *(row["name"], row["owner"], row["image"], row["hollow"], row["most"]),
            called=called,
            ready=row["ready"],
            stated=bool(row["stated"]),
        )


class PoolRule(msgspec.Struct, frozen=True):
    """A pool that the administrator keeps: a ``[[pools]]`` table."""

    name: Annotated[
        str,
        msgspec.Meta(
            pattern=rf"\A{POOL_NAME}\Z", title=f"a name of a pool ({NAMED})", examples=["chat"]
        ),
        about("Its name, which no other pool has."),
    ]
    image: Annotated[
        str,
        msgspec.Meta(min_length=1, title="an image", examples=["ann/chat"]),
        about("""An image's id, or `USER/NAME` for the newest image of a user's program when phosd
            starts or reads this again."""),
    ]
    hollow: Annotated[
        int,
        msgspec.Meta(ge=0, le=64, title="a number from 0 to 64", examples=[2]),
        about("How many of its programs wait hollow."),
    ] = 1
    ready: Annotated[
        int,
        msgspec.Meta(ge=0, le=64, title="a number from 0 to 64", examples=[1]),
        about("How many more wait with their memory on the GPUs."),
    ] = 0
    max: Annotated[
        int,
        msgspec.Meta(ge=1, le=1000, title="a number from 1 to 1000", examples=[8]),
        about("How many there may be, with those that run."),
    ] = 8

    def __post_init__(self) -> None:
        if self.hollow + self.ready > self.max:
            raise ValueError("more programs are to wait than there may be; raise max")

    @property
    def size(self) -> PoolRequest:
        """How many programs there are to be."""
        return PoolRequest(hollow=self.hollow, ready=self.ready, max=self.max)


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
