"""Define the options of requests: the engine's options and those of the job.

With ``queue`` a job waits for another job that holds the process. Repeating the ``token`` of an
earlier request by the same user returns the job of that request.
"""

from typing import Annotated

import msgspec

from phosd.engine.operations.checkpoint import CheckpointChoices
from phosd.engine.operations.migrate import MigrateChoices
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.rehearse import RehearseOptions
from phosd.engine.operations.resume import ResumeChoices
from phosd.engine.operations.suspend import SuspendChoices
from phosd.engine.operations.transfer.import_image import ImportChoices
from phosd.service.dbus.spec import Options

Token = Annotated[str, msgspec.Meta(max_length=128)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=31 * 86_400)]
END_OF_TIME = (1 << 63) - 1
Time = Annotated[int, msgspec.Meta(ge=0, le=END_OF_TIME)]
"""Microseconds since the epoch."""
Keep = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class JobOptions(Options, frozen=True):
    """Options of a job that has no others."""

    token: Token = ""


class CheckpointRequest(CheckpointChoices, frozen=True, omit_defaults=True, kw_only=True):
    """``parent`` may be ``auto``, too. ``every`` (seconds) repeats the checkpoint until the process
    ends, and keeps the last ``keep`` images so made; 0 ends that. ``rehearse``: the restore of each
    is rehearsed.
    """

    queue: bool = False
    every: Seconds | None = None
    keep: Keep | None = None
    rehearse: bool = False
    token: Token = ""


class OwnCheckpointRequest(CheckpointRequest, frozen=True, omit_defaults=True, kw_only=True):
    """The request of a process for a checkpoint of itself; ``wish`` is its number for it, ``name``
    that of the image. A user, who could not know that number, cannot set these options.
    """

    wish: int
    name: str = ""


class RestoreRequest(RestoreOptions, frozen=True):
    """Options of a restore."""

    token: Token = ""


class PoolRequest(Options, frozen=True):
    """How many programs of a pool wait hollow, how many more ready, and how many there may be in
    all; None: as before, or one, none and eight.
    """

    hollow: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    ready: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    max: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None


class ImportRequest(ImportChoices, frozen=True):
    """Options of an import. ``owner``: to whom the image is going to belong, by default the caller;
    ``trust``: though nobody has signed it. For root.
    """

    owner: Annotated[int, msgspec.Meta(ge=0, lt=(1 << 32) - 1)] | None = None
    trust: bool = False
    token: Token = ""


class VerifyRequest(RehearseOptions, frozen=True):
    """Options of a verification. With ``rehearse`` the image's restore is rehearsed, and ``files``
    is as of that.
    """

    rehearse: bool = False
    token: Token = ""


class MigrateRequest(MigrateChoices, frozen=True, kw_only=True):
    """Options of a migration."""

    queue: bool = False
    token: Token = ""


class SuspendRequest(SuspendChoices, frozen=True):
    """Options of a suspension, and of a swap."""

    queue: bool = False
    token: Token = ""


class SleepRequest(SuspendRequest, frozen=True, omit_defaults=True):
    """Options of a suspension, but of no swap. ``wake``: the program is hollow until somebody calls
    it. ``idle``: so it is again whenever it has computed nothing for so many seconds.
    """

    wake: bool = False
    idle: Annotated[float, msgspec.Meta(ge=1, le=31 * 86_400)] | None = None

    @property
    def each(self) -> SuspendRequest:
        """The request for one suspension."""
        said = {name: getattr(self, name) for name in SuspendRequest.__struct_fields__}
        return SuspendRequest(**said | {"hollow": self.hollow or self.sleeps})

    @property
    def sleeps(self) -> bool:
        """Whether the program is to be woken when somebody calls it."""
        return self.wake or self.idle is not None


class ResumeRequest(ResumeChoices, frozen=True):
    """Options of resuming a process."""

    queue: bool = False
    token: Token = ""
