"""What is to be checkpointed again and again, and which of the images so made may go."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

import msgspec

from phosd.engine.program.process import GpuProcess
from phosd.engine.system.procfs import ProcessId
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.process_identity import Target, process_key

KEEP = 5
"""Images of a schedule that are kept when nobody says how many."""


@dataclass(frozen=True)
class PeriodicRule:
    """Processes that are checkpointed every so many seconds, the last ``keep`` images kept.

    ``command`` is a pattern with ``*`` and ``?`` for the whole command line; ``user`` is a user id.
    """

    every: float
    keep: int = KEEP
    user: int | None = None
    command: str = "*"

    def fits(self, process: GpuProcess) -> bool:
        """Whether the rule is about this process."""
        theirs = self.user is None or self.user == process.uid
        return theirs and fnmatchcase(" ".join(process.command), self.command)


@dataclass(frozen=True)
class Schedule:
    """The periodic checkpoints of one process of this boot, asked for by ``owner``.

    ``ended`` says why there are none any more; such a schedule is kept as long as its process
    lives, so that no rule of the configuration begins it anew.
    """

    boot_id: str
    target: Target
    owner: int
    request: CheckpointRequest
    ended: str = ""

    @property
    def every(self) -> float:
        """Seconds from one checkpoint to the next; 0 when there are none any more."""
        return 0.0 if self.ended else self.request.every or 0.0

    @property
    def keep(self) -> int:
        """How many of its images are kept."""
        return self.request.keep or KEEP

    @property
    def each(self) -> CheckpointRequest:
        """What is asked for each time: an image that shares what it can with the one before."""
        return msgspec.structs.replace(
            self.request, every=None, keep=None, token="", queue=False, parent="auto"
        )

    @property
    def key(self) -> str:
        """Names the process, and with it the schedule, for ever."""
        return self.key_of(self.row())

    @staticmethod
    def key_of(row: Mapping[str, Any]) -> str:
        """The same, of a row of the history."""
        return process_key(row["boot_id"], row["pid"], row["start_time"])

    def row(self) -> dict[str, Any]:
        """As the history keeps it."""
        return {
            "boot_id": self.boot_id,
            "pid": self.target.pid,
            "start_time": self.target.start_time,
            "uid": self.target.uid,
            "owner": self.owner,
            "options": msgspec.json.encode(self.request).decode(),
            "ended": self.ended,
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Raises :class:`msgspec.DecodeError` when another version has written it."""
        return cls(
            row["boot_id"],
            Target(ProcessId(row["pid"], row["start_time"]), row["uid"]),
            row["owner"],
            msgspec.json.decode(row["options"], type=CheckpointRequest),
            row["ended"],
        )


def surplus(images: Mapping[str, bool | None], keep: int) -> list[str]:
    """Which images of a schedule may go: those older than the last ``keep`` good ones.

    ``images``, newest first, tell whether each was found whole, None if it was never verified.
    """
    good = 0
    gone = []
    for image, whole in images.items():
        if good == keep:
            gone.append(image)
        elif whole is not False:
            good += 1
    return gone
