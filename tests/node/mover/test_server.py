"""What the mover's process does when its GPU fails, with a GPU made to fail."""

import contextlib
import socket
import threading
from typing import cast

import pytest

from phosd.engine.mover.protocol import wire
from phosd.engine.mover.protocol.connection import Connection, PeerGone
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.guarded import GuardedMemory
from phosd.engine.mover.worker.pinned_packs import PinnedPacks
from phosd.engine.mover.worker.ring import Ring
from phosd.engine.mover.worker.server import Server
from phosd.errors import Internal


class BrokenGpu:
    """Fails every drop; ``works`` says whether its context survives that."""

    def __init__(self, works: bool) -> None:
        self.works = works

    def attach(self) -> None:
        pass

    def keeping(self, keys: list[int]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rename(self, keys: dict[int, int]) -> None:
        assert not keys

    def drop(self, keys: set[int]) -> None:
        raise Internal(f"cuMemUnmap failed for {keys}: CUDA_ERROR_ILLEGAL_ADDRESS")

    def usable(self) -> bool:
        return self.works

    def free_memory(self) -> tuple[int, int]:
        return 1, 2


@pytest.mark.parametrize("works", [True, False])
def test_a_broken_context_ends_the_mover_after_its_answer(works: bool) -> None:
    end, other_end = socket.socketpair()
    ours = Connection(end)
    gpu = cast(Gpu, BrokenGpu(works))
    server = Server(
        Connection(other_end), gpu, cast(Ring, None), PinnedPacks(gpu), GuardedMemory(gpu)
    )

    def serve() -> None:
        server.run()
        other_end.shutdown(socket.SHUT_RDWR)  # as the end of the process does

    thread = threading.Thread(target=serve)
    thread.start()
    assert ours.receive(5) == (0, wire.Done(wire.VERSION), [])
    ours.send(1, wire.Drop([7]))
    received = ours.receive(5)
    assert received is not None
    answer = received[1]
    assert isinstance(answer, wire.Failed)
    assert answer.code == "Internal" and "ILLEGAL_ADDRESS" in answer.what
    if works:
        ours.send(2, wire.FreeMemory())
        assert ours.receive(5) == (2, wire.Memory(1, 2), [])
        ours.close()
    else:
        thread.join(5)
        with pytest.raises(PeerGone):
            ours.receive(5)
            ours.send(2, wire.FreeMemory())
            ours.receive(5)
    thread.join(5)
    assert not thread.is_alive()
