"""Keep a mover's process that waits for its engine: started ahead, with nothing of its GPU yet.

Its interpreter, its modules and the driver's library are loaded, and the driver is not initialised,
so the process takes no device memory, and does not count as a user of the GPU.
"""

from pathlib import Path
from typing import Self

from phosd.engine.mover.client.launcher import Child, MoverProcess, connections
from phosd.engine.mover.client.rescue_client import RescueClient
from phosd.engine.mover.client.ring import ring_size
from phosd.engine.mover.protocol.connection import Connection, PeerGone
from phosd.engine.mover.protocol.endpoint import path_of
from phosd.errors import PhosError

_END_SECONDS = 10.0


class Standby:
    """A process that becomes the mover of a GPU when an engine attaches. It ends a while after the
    end of this connection, even by a kill.
    """

    def __init__(self, client: RescueClient, process: MoverProcess, child: Child | None) -> None:
        self.child = child
        """The process that this engine has started, if no mover was there."""
        self._client = client
        self._process = process

    @classmethod
    def start(cls, gpu: int, ring_bytes: int | None, runtime_dir: Path) -> Self:
        """Return the standby of a GPU, once it listens in ``runtime_dir``; see
        :meth:`~phosd.engine.mover.client.mover.Mover.start`.
        """

        found = connections(gpu, ring_size(ring_bytes), runtime_dir)
        path = path_of(runtime_dir, gpu)
        return next(standby for each in found if (standby := cls._visit(path, *each)))

    @classmethod
    def _visit(cls, path: Path, connection: Connection, child: Child | None) -> Self | None:
        """Return the standby that listens on ``path``; None if it was about to end."""
        process: MoverProcess | None = None
        try:
            process = MoverProcess(connection.peer()[0], child)
            return cls(RescueClient(path, connection), process, child)
        except BaseException as error:
            connection.close()
            if process is not None:
                process.close()
            if isinstance(error, PeerGone | ProcessLookupError):
                return None
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.running

    def release(self) -> None:
        """Release the process, for an engine that has attached, or after its end."""
        self._client.close()
        self._process.close()

    def end(self) -> None:
        """End the process, unless an engine uses it."""
        try:
            self._client.end_unused()
        except PhosError:  # it has ended, or had an engine before: then it ends by itself
            self._process.wait(0)
        else:
            if not self._process.wait(_END_SECONDS):
                self._process.kill()
                self._process.wait(_END_SECONDS)
        self.release()
