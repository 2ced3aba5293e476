"""Serve one of the engine's connections, one request at a time."""

import logging
import queue
import threading

from phosd.engine.faults import Point, point
from phosd.engine.mover.protocol import wire
from phosd.engine.mover.protocol.connection import Connection, PeerGone
from phosd.engine.mover.worker.copy import copy
from phosd.engine.mover.worker.drain import drain
from phosd.engine.mover.worker.fetch import fetch
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.guarded import GuardedMemory
from phosd.engine.mover.worker.load import load
from phosd.engine.mover.worker.pinned_packs import PinnedPacks
from phosd.engine.mover.worker.ring import Ring
from phosd.engine.mover.worker.sample import count_different
from phosd.engine.mover.worker.save import save
from phosd.engine.mover.worker.transfer import Transfer, close_all
from phosd.errors import Internal, PhosError

_log = logging.getLogger(__name__)


class Server:
    """Carries out requests until the engine closes the connection."""

    def __init__(
        self,
        connection: Connection,
        gpu: Gpu,
        ring: Ring,
        pinned_packs: PinnedPacks,
        parked: GuardedMemory,
    ) -> None:
        self.leaving = False
        """Whether the engine has released the mover (:class:`wire.Leave`)."""
        self._connection = connection
        self._gpu = gpu
        self._pinned_packs = pinned_packs
        self._transfer = Transfer(gpu, ring, pinned_packs, self._given_up, self._report)
        self._parked = parked
        self._requests: queue.SimpleQueue[tuple[int, wire.Message, list[int]] | None]
        self._requests = queue.SimpleQueue()
        self._sequence = 0
        self._cancelled = -1
        self._gone = False
        self._settled = threading.Event()
        self._settled.set()
        self._sending = threading.Lock()

    def run(self) -> bool:
        """Serve until the connection ends, or the GPU's context is broken: then return False."""
        self._gpu.attach()
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        self._send(wire.Done(wire.VERSION))
        while (received := self._requests.get()) is not None:
            self._sequence, request, descriptors = received
            answer, outgoing = self._answer(request, descriptors)
            self._send(answer, outgoing)
            if isinstance(answer, wire.Failed) and not self._gpu.usable():
                _log.error("the context of the GPU is broken")
                return False
        return True

    def _receive(self) -> None:
        try:
            while (received := self._connection.receive(None)) is not None:
                sequence, message, _ = received
                if isinstance(message, wire.Cancel):
                    self._cancelled = sequence
                elif isinstance(message, wire.Settled):
                    self._settled.set()
                else:
                    self._requests.put(received)
        except PeerGone:
            _log.debug("the engine is gone")
        finally:
            self._gone = True
            self._requests.put(None)

    def _answer(
        self, request: wire.Message, descriptors: list[int]
    ) -> tuple[wire.Message, list[int]]:
        """Carry out a request. Its descriptors are closed, unless blocks keep them."""
        kept = False
        try:
            with self._gpu.keeping(_used(request)):
                answer = self._carry_out(request, descriptors)
            kept = isinstance(request, wire.Adopt)
        except PhosError as error:
            return wire.Failed(error.code, error.what, error.hint, error.reason), []
        except Exception as error:
            _log.exception("%s failed", type(request).__name__)
            return wire.Failed("Internal", f"the data mover failed: {error!r}", "see its log"), []
        finally:
            if not kept:
                close_all(descriptors)
        return answer

    def _carry_out(
        self, request: wire.Message, descriptors: list[int]
    ) -> tuple[wire.Message, list[int]]:
        gpu = self._gpu
        match request:
            case wire.Adopt():
                point(Point.MOVER_ADOPT)
                gpu.adopt(request.blocks, descriptors, request.home)
            case wire.Create():
                return wire.Done(), gpu.create(request.blocks, request.host)
            case wire.CreateTogether():
                gpu.create_together(request.blocks)
            case wire.Drop():
                self._parked.drop(request.keys)
            case wire.Digest():
                point(Point.MOVER_DIGEST)
                blobs = gpu.digest(request.keys)
                return wire.Digests(list(zip(request.keys, blobs, strict=True))), []
            case wire.Sample():
                different = count_different(gpu, self._transfer.ring, request.keys)
                return wire.Sampled(different), []
            case wire.Save():
                return save(self._transfer, request, descriptors), []
            case wire.Copy():
                return copy(self._transfer, request, descriptors, self._let_go), []
            case wire.Drain():
                self._settled.set()
                settled = self._settled.is_set
                return drain(self._transfer, request, descriptors, self._let_go, settled), []
            case wire.Pin():
                return wire.Pinned(self._pinned_packs.pin(descriptors, kept=request.kept)), []
            case wire.Unpin():
                self._pinned_packs.unpin(request.number, keep=request.keep)
            case wire.Load():
                load(self._transfer, request, descriptors)
            case wire.Fetch():
                fetch(self._transfer, request)
            case wire.FreeMemory():
                return wire.Memory(*gpu.free_memory()), []
            case wire.Reserve():
                gpu.reserve(request.byte_count, request.processes)
            case wire.Guard():
                self._parked.guard(request.blocks)
            case wire.Unguard() | wire.ListParked():
                return self._parked.answer(request)
            case wire.Leave():
                self.leaving = True
                return wire.Farewell(not self._parked.empty), []
            case _:
                raise Internal(f"the data mover does not know {type(request).__name__}")
        return wire.Done(), []

    def _given_up(self) -> bool:
        return self._gone or self._cancelled == self._sequence

    def _report(self, byte_count: int) -> None:
        self._send(wire.Moved(byte_count))

    def _let_go(self, keys: list[int]) -> None:
        self._settled.clear()
        self._send(wire.Dropped(keys))

    def _send(self, message: wire.Message, descriptors: "list[int] | None" = None) -> None:
        with self._sending:
            try:
                self._connection.send(self._sequence, message, descriptors)
            except PeerGone:
                self._gone = True


def _used(request: wire.Message) -> list[int]:
    """Return the keys of blocks that must not be dropped during the request."""
    match request:
        case wire.Digest() | wire.Sample():
            return request.keys
        case wire.Save() | wire.Load():
            return [key for key, _ in request.blocks]
        case wire.Copy():
            return [key for key, *_ in request.chunks]
        case wire.Fetch():
            return [key for pair in request.blocks for key in pair[:2]]
        case wire.Drain():
            slabs = [key for chunk_map in request.chunk_maps for key in chunk_map.slabs]
            return slabs + [
                block.key for chunk_map in request.chunk_maps for block in chunk_map.blocks
            ]
        case _:
            return []
