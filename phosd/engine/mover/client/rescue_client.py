"""Ask a mover whose engine is gone, or busy, for the memory of parked processes."""

import itertools
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self, TypeVar

from phosd.engine.mover.client.launcher import log_of
from phosd.engine.mover.protocol import wire
from phosd.engine.mover.protocol.connection import Connection, PeerGone
from phosd.engine.mover.protocol.endpoint import connect, sockets
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, PhosError, Timeout

_TIMEOUT = 30.0
_log = logging.getLogger(__name__)
_R = TypeVar("_R", bound=wire.Message)


class RescueClient:
    """A connection to a mover beside its engine's. The mover goes on whatever happens to it."""

    def __init__(self, path: Path, connection: Connection) -> None:
        self._path = path
        self.gpu = int(path.stem)
        """The ordinal of the mover's GPU."""
        self._connection = connection
        self._sequence = itertools.count(1)
        connection.send(0, wire.Attach(b""))
        self._reply(0, wire.Done)

    def parked(self) -> dict[ProcessId, dict[int, int]]:
        """Return the guarded blocks: descriptors, for the caller to close, by process and id.

        Processes for which only device memory is reserved have no blocks.
        """
        answer, descriptors = self._ask(wire.ListParked(), wire.Parked)
        found: dict[ProcessId, dict[int, int]] = {process: {} for process in answer.room}
        for (pid, start, block), descriptor in zip(answer.blocks, descriptors, strict=True):
            found.setdefault(ProcessId(pid, start), {})[block] = descriptor
        return found

    def unguard(self, processes: Iterable[ProcessId]) -> None:
        """Stop guarding blocks of these processes, which have their memory again."""
        self._ask(wire.Unguard(list(processes)), wire.Done)

    def unreserve(self, processes: Iterable[ProcessId]) -> None:
        """Release the device memory reserved for these processes, which return now."""
        self._ask(wire.Reserve(0, list(processes)), wire.Done)

    def end_unused(self) -> None:
        """End the mover. Raises :class:`Internal` if it has, or had, an engine."""
        self._ask(wire.Leave(), wire.Farewell)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: wire.Message, kind: type[_R]) -> tuple[_R, list[int]]:
        sequence = next(self._sequence)
        self._connection.send(sequence, request)
        return self._reply(sequence, kind)

    def _reply(self, sequence: int, kind: type[_R]) -> tuple[_R, list[int]]:
        end = time.monotonic() + _TIMEOUT
        received = self._connection.receive(end - time.monotonic())
        if received is None:
            raise Timeout(
                f"the data mover at {self._path} does not answer",
                hint=f"see {log_of(self.gpu)} and the driver's log (dmesg), and try again",
            )
        number, answer, descriptors = received
        if isinstance(answer, wire.Failed) or number != sequence or not isinstance(answer, kind):
            why = answer.what if isinstance(answer, wire.Failed) else type(answer).__name__
            raise Internal(
                f"the data mover at {self._path} refused: {why}",
                hint=f"see {log_of(self.gpu)}",
            )
        return answer, descriptors


def rescue_clients(
    runtime_dir: Path, silent: "list[PhosError] | None" = None
) -> list[RescueClient]:
    """Connect to each mover that runs in ``runtime_dir``. The caller closes the clients.

    Errors of movers that do not answer are added to ``silent``; it is unknown what they guard.
    """
    found = []
    for path in sockets(runtime_dir):
        connection = connect(path)
        if connection is None:
            continue  # it has ended, or was killed
        try:
            found.append(RescueClient(path, connection))
        except PeerGone:
            connection.close()  # it ended just now, so it guarded nothing
        except PhosError as error:
            connection.close()
            _log.error("%s", error)
            if silent is not None:
                silent.append(error)
    return found
