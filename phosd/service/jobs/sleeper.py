"""A sleeper: a program that is suspended until somebody calls it."""

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from phosd.engine.image.called import Called
from phosd.engine.node.suspended import Suspended
from phosd.engine.system.procfs import ProcessId, boot_id
from phosd.service.jobs.options import SleepRequest


class Sleeper(msgspec.Struct, frozen=True):
    """The program of ``process``, which belongs to ``owner`` and uses ``gpus`` by its processes
    ``users``. ``acting`` is the user id whose rights count. ``suspension`` is the image of the one
    in which it sleeps; empty: it is awake.
    """

    process: ProcessId
    owner: int
    acting: int
    request: SleepRequest
    suspension: str
    users: tuple[ProcessId, ...]
    gpus: tuple[int, ...]
    called: Called = Called()

    @property
    def idle(self) -> float:
        """The seconds without work after which it falls asleep; 0: it does not."""
        return self.request.idle or 0.0

    def asleep(self, suspended: Suspended) -> Self:
        """Return the sleeper as it is in a suspension."""
        return msgspec.structs.replace(
            self, suspension=suspended.image, users=suspended.processes, gpus=suspended.gpus
        )

    def awake(self) -> Self:
        """Return the sleeper as it is when it runs, on the GPUs that it had."""
        return msgspec.structs.replace(self, suspension="")

    def row(self) -> dict[str, Any]:
        """Return the sleeper as a row of the history."""
        return {
            "boot_id": boot_id(),
            **self.process._asdict(),
            "told": msgspec.json.encode(self).decode(),
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a sleeper from a row. Raises :class:`msgspec.DecodeError` when another version wrote
        it.
        """
        return msgspec.json.decode(row["told"], type=cls)
