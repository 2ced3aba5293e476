"""Define periodic checkpoints: the rules, the schedule of a process, and which images to delete."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

import msgspec

from phosd.engine.program.process import GpuProcess
from phosd.engine.system.procfs import ProcessId
from phosd.service.config_values import (
    LEAST_SECOND,
    Duration,
    Images,
    Pattern,
    UserId,
    about,
)
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.process_identity import Target, process_key

KEEP = 5
"""Images that a schedule keeps by default."""


class PeriodicRule(msgspec.Struct, frozen=True):
    """A rule that checkpoints the processes that match it: a ``[[periodic]]`` table."""

    every: Annotated[Duration, LEAST_SECOND, about("The time between two checkpoints.")]
    keep: Annotated[Images, about("How many images of each process are kept.")] = KEEP
    user: Annotated[UserId | None, about("Whose processes; by default everybody's.")] = None
    command: Annotated[Pattern, about("For the whole command line, with * and ?.")] = "*"

    def fits(self, process: GpuProcess) -> bool:
        """Whether the rule matches a process."""
        theirs = self.user is None or self.user == process.uid
        return theirs and fnmatchcase(" ".join(process.command), self.command)


@dataclass(frozen=True)
class Schedule:
    """The periodic checkpoints of one process of this boot, requested by ``owner``.

    ``ended`` says why the schedule has ended. An ended schedule is kept while its process lives, so
    that no rule of the configuration starts it again.
    """

    boot_id: str
    target: Target
    owner: int
    request: CheckpointRequest
    ended: str = ""

    @property
    def every(self) -> float:
        """Seconds between two checkpoints; 0 when the schedule has ended."""
        return 0.0 if self.ended else self.request.every or 0.0

    @property
    def keep(self) -> int:
        """How many images the schedule keeps."""
        return self.request.keep or KEEP

    @property
    def rehearse(self) -> bool:
        """Whether the restore of each image is rehearsed."""
        return self.request.rehearse

    @property
    def each(self) -> CheckpointRequest:
        """The request for one checkpoint: its image shares chunks with the one before where
        possible.
        """
        return msgspec.structs.replace(
            self.request,
            every=None,
            keep=None,
            rehearse=False,
            token="",
            queue=False,
            parent="auto",
        )

    @property
    def key(self) -> str:
        """Key of the process, and so of its schedule; unique across reboots."""
        return self.key_of(self.row())

    @staticmethod
    def key_of(row: Mapping[str, Any]) -> str:
        """Return the key of a row of the history."""
        return process_key(row["boot_id"], row["pid"], row["start_time"])

    def row(self) -> dict[str, Any]:
        """Return the schedule as a row of the history."""
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
        """Read a schedule from a row. Raises :class:`msgspec.DecodeError` when another version
        wrote it.
        """
        return cls(
            row["boot_id"],
            Target(ProcessId(row["pid"], row["start_time"]), row["uid"]),
            row["owner"],
            msgspec.json.decode(row["options"], type=CheckpointRequest),
            row["ended"],
        )


def surplus(images: Mapping[str, bool | None], keep: int) -> list[str]:
    """Return the images that a schedule may delete: those older than its last ``keep`` good ones.

    ``images``, newest first, has whether each verified as intact; None if it was never verified.
    """
    good = 0
    gone = []
    for image, whole in images.items():
        if good == keep:
            gone.append(image)
        elif whole is not False:
            good += 1
    return gone
