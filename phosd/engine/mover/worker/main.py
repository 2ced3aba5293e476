"""Run the data mover's process, from before its engine attaches until it is not needed.

It serves one engine at a time. When the engine's connection ends, even by a kill, guarded memory
stays (see guarded.py), everything else is dropped, and the mover waits for the next engine, or for
a visitor that brings processes back. A mover that keeps nothing exits after a while.
"""

import argparse
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from phosd.engine.chunk_map import chunk_map
from phosd.engine.digest import DigestKey
from phosd.engine.mover.protocol import wire
from phosd.engine.mover.protocol.connection import Connection
from phosd.engine.mover.protocol.endpoint import listening
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.guarded import GuardedMemory
from phosd.engine.mover.worker.pinned_packs import PinnedPacks
from phosd.engine.mover.worker.ring import Ring, RingMemory
from phosd.engine.mover.worker.server import Server
from phosd.engine.mover.worker.transfer import close_all
from phosd.engine.system import cuda
from phosd.engine.system.log_format import LogFormatter
from phosd.engine.system.rlimit import allow_many_descriptors
from phosd.engine.system.sd_notify import Supervisor
from phosd.errors import Busy, Internal, PhosError

LINGER_SECONDS = float(os.environ.get("PHOS_TEST_LINGER", "30"))
"""Seconds that a mover which keeps nothing waits for an engine."""
_ATTACH_SECONDS = 10.0
"""Seconds that a client has to send :class:`wire.Attach`."""
_TURN_SECONDS = 30.0
"""Seconds that an engine waits until the mover has finished with an earlier one."""
_LOOK_SECONDS = 1.0
"""Seconds between checks whether the processes that memory is kept for still live."""

_log = logging.getLogger(__name__)


class MoverDaemon:
    """Serve the clients of GPU ``gpu``'s mover, until it is no longer needed."""

    def __init__(self, gpu: int, ring_bytes: int, linger: float) -> None:
        self._ordinal = gpu
        self._ring_bytes = ring_bytes
        self._linger = linger
        self._patience = linger
        self._ready: tuple[Gpu, Ring, GuardedMemory] | None = None
        self._turn = threading.Lock()
        self._clients: list[threading.Thread] = []
        self._needed = time.monotonic()
        self._status: int | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self, listener: socket.socket) -> int:
        """Serve every client that connects. Returns the exit status."""
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        _open_libraries()
        while self._status is None:
            if any(fd == listener.fileno() for fd, _ in poller.poll(_LOOK_SECONDS * 1000)):
                self._admit(listener)
            try:
                self._look()
            except PhosError as error:
                _log.error("the GPU does not answer: %s", error)
            except Exception:  # whatever it is, guarded memory must not be lost for it
                _log.exception("looking after what is kept failed, and is tried again")
        return self._status

    def _admit(self, listener: socket.socket) -> None:
        try:
            end, _ = listener.accept()
        except OSError as error:  # no descriptor is left: try again later
            _log.error("nobody can be admitted: %s", error)
            time.sleep(_LOOK_SECONDS)
            return
        client = threading.Thread(target=self._serve, args=(end,), daemon=True)
        try:
            client.start()
        except RuntimeError as error:  # no thread is left: the client will come again
            _log.error("a client is sent away: %s", error)
            end.close()
            return
        self._clients.append(client)

    def _look(self) -> None:
        if self._ready is not None:
            gpu, _, parked = self._ready
            gpu.attach()
            parked.forget_the_dead()
        self._clients = [client for client in self._clients if client.is_alive()]
        if self._clients or (self._ready is not None and not self._ready[2].empty):
            self._needed = time.monotonic()
        elif time.monotonic() - self._needed > self._patience:
            self._end(0)

    def _end(self, status: int) -> None:
        if self._status is None:
            self._status = status
        os.eventfd_write(self._wake, 1)

    def _serve(self, end: socket.socket) -> None:
        connection = Connection(end)
        connections = [connection]
        try:
            if connection.peer()[1] not in (0, os.geteuid()):
                return  # only root may connect, as only root may enter the folder
            received = connection.receive(_ATTACH_SECONDS)
            match received:
                case (_, wire.Attach(key=b""), []):
                    self._serve_visitor(connection)
                case (_, wire.Attach(key=key), [_, _, _] as others):
                    connections += (Connection(socket.socket(fileno=other)) for other in others)
                    self._serve_engine(connections, key)
                case (_, _, descriptors):
                    close_all(descriptors)
        except PhosError as error:
            _log.debug("a client is gone: %s", error)
        finally:
            for connection in connections:
                connection.close()

    def _serve_visitor(self, connection: Connection) -> None:
        connection.send(0, wire.Done())
        if self._ready is not None:
            self._ready[0].attach()
        while (received := connection.receive(None)) is not None:
            sequence, request, descriptors = received
            close_all(descriptors)
            try:
                answer: tuple[wire.Message, list[int]]
                if self._ready is not None:
                    answer = self._ready[2].answer(request)
                elif isinstance(request, wire.Leave) and not self._turn.locked():
                    self._end(0)
                    answer = wire.Farewell(stays=False), []
                else:  # no engine has been here, so it guards nothing
                    answer = _guards_nothing(request), []
            except PhosError as error:
                answer = wire.Failed(error.code, error.what, error.hint, error.reason), []
            connection.send(sequence, *answer)

    def _serve_engine(self, connections: Sequence[Connection], key: bytes) -> None:
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            what = f"the data mover of GPU {self._ordinal} works for another phosd"
            connections[0].send(0, wire.Failed("Busy", what, "end that one first"))
            return
        try:
            gpu, ring, parked = self._made_ready(DigestKey.from_packed(key))
        except PhosError as error:
            connections[0].send(0, wire.Failed(error.code, error.what, error.hint, error.reason))
            self._end(1)
            return
        else:
            self._work(connections, gpu, ring, parked)
        finally:
            self._turn.release()

    def _made_ready(self, key: DigestKey) -> tuple[Gpu, Ring, GuardedMemory]:
        """Return the GPU, its ring and its guarded memory, made once, with the engine's key."""
        if self._ready is None:
            times = [time.monotonic()]
            with ThreadPoolExecutor(1) as beside:
                memory = beside.submit(RingMemory, self._ring_bytes)
                cuda.driver()
                times.append(time.monotonic())
                gpu = Gpu(self._ordinal, key)
                times.append(time.monotonic())
                self._ready = gpu, Ring(memory.result()), GuardedMemory(gpu)
            times.append(time.monotonic())
            each = [end - begin for begin, end in pairwise(times)]
            _log.info("ready in %.2f s: driver %.2f, context %.2f, ring %.2f", sum(each), *each)
        self._ready[0].use(key)
        return self._ready

    def _work(
        self, connections: Sequence[Connection], gpu: Gpu, ring: Ring, parked: GuardedMemory
    ) -> None:
        self._patience = self._linger
        pinned_packs = PinnedPacks(gpu)
        servers = [
            Server(connection, gpu, ring, pinned_packs, parked) for connection in connections
        ]
        usable: list[bool] = []

        def serve(server: Server) -> None:
            try:
                usable.append(server.run())
            finally:
                for connection in connections:  # the engine keeps all connections or none
                    connection.shut_down()

        threads = [threading.Thread(target=serve, args=(each,), daemon=True) for each in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not all(usable):  # guarded memory is safe: the engine lives, and holds it, too
            self._end(1)
            return
        leaving = any(server.leaving for server in servers)
        if leaving and parked.empty:
            self._end(0)  # what the engine had goes with the process, and faster
            return
        gpu.attach()
        try:
            pinned_packs.unpin_all()
            parked.end_session()
        except PhosError as error:
            _log.error("what the engine had cannot be dropped: %s", error)
            if parked.empty:
                self._end(1)
        if leaving:
            self._patience = 0.0  # exit as soon as nothing is kept
            if parked.empty:
                self._end(0)


def _open_libraries() -> None:
    """Load early what takes no GPU and is slow to load, if the first engine comes late enough."""
    try:
        cuda.bindings()
    except PhosError as error:
        _log.debug("the first engine will be told: %s", error)
    chunk_map.library()


def _guards_nothing(request: wire.Message) -> wire.Message:
    """Return the answer to a visitor of a mover that guards nothing."""
    match request:
        case wire.ListParked():
            return wire.Parked([], [])
        case wire.Unguard() | wire.Reserve(byte_count=0):
            return wire.Done()
        case _:
            raise Internal(f"a visitor may not ask for {type(request).__name__}")


def begin_log(gpu: int) -> None:
    """Log to standard error, which is phosd's log."""
    log = logging.StreamHandler()
    log.setFormatter(LogFormatter(f"mover {gpu}: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m phosd.engine.mover``."""
    parser = argparse.ArgumentParser(
        prog="phosd.engine.mover",
        description="The data mover of one GPU: serves phosd at DIR/mover/N.sock, and keeps the"
        " memory of parked processes when phosd ends.",
    )
    parser.add_argument("--gpu", type=int, required=True, metavar="N", help="ordinal of the GPU")
    parser.add_argument("--ring", type=int, required=True, metavar="BYTES", help="pinned memory")
    parser.add_argument("--runtime-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--linger",
        type=float,
        default=LINGER_SECONDS,
        metavar="SECONDS",
        help="how long to stay when nobody needs it (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    begin_log(options.gpu)
    allow_many_descriptors()
    # Let the driver load the digest kernel at the start, not when it is first launched: in a stop
    # there may be no device memory for it, and it must not run beside programs (hazard 47).
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    try:
        with listening(options.runtime_dir, options.gpu) as listener:
            Supervisor().ready()
            return MoverDaemon(options.gpu, options.ring, options.linger).run(listener)
    except Busy:
        return 0  # another mover has started: the engine finds that one
    except (PhosError, OSError) as error:
        print(f"mover {options.gpu}: {error}", file=sys.stderr)
        return 1
