"""Two processes of which the first shares device memory with the second only when it is told to: by
a file ``share`` in its folder. Then it makes a file ``shared``.

The values are the same whether it is shared yet or not: what the first has just written is read
back, by the second if it has the memory. The second argument says where the second process is:
``below`` the first, ``beside`` it, or below it without a context until the memory comes (``new``).
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, State, ok, read
from shared_pair import POSIX, map_memory, properties, receive

SIZE = 2 << 20
PIECE = 4 << 10


def second(peer: socket.socket, *, at_once: bool) -> None:
    device = Device() if at_once else None
    peer.sendall(b"!")
    _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    device = device or Device()
    handle = ok(driver.cuMemImportFromShareableHandle(descriptors[0], POSIX))
    os.close(descriptors[0])
    shared = map_memory(handle, SIZE)
    peer.sendall(b"!")
    while True:
        offset = int.from_bytes(receive(peer, 8), "little")
        peer.sendall(read(shared + offset, PIECE))


def share(handle: Any, peer: socket.socket) -> None:
    descriptor = int(ok(driver.cuMemExportToShareableHandle(handle, POSIX, 0)))
    socket.send_fds(peer, [b"m"], [descriptor])
    os.close(descriptor)
    receive(peer, 1)
    Path("shared").touch()


def first(peer: socket.socket) -> None:
    report = Report()
    device = Device()
    state = State(device, cold_block=128 << 10)
    handle = ok(driver.cuMemCreate(SIZE, properties(), 0))
    memory = map_memory(handle, SIZE)
    receive(peer, 1)
    shared = False
    for step in report.steps():
        if not shared and Path("share").exists():
            share(handle, peer)
            shared = True
        mine = state.step(step, report.seed)
        offset = step * PIECE % SIZE
        ok(driver.cuMemsetD32(memory + offset, int.from_bytes(mine[:4], "little"), PIECE // 4))
        ok(driver.cuCtxSynchronize())
        if shared:
            peer.sendall(offset.to_bytes(8, "little"))
        seen = receive(peer, PIECE) if shared else read(memory + offset, PIECE)
        report.tell(step, mine + seen)


def main() -> None:
    where = sys.argv[2] if len(sys.argv) > 2 else "below"
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        second(theirs, at_once=where != "new")
    theirs.close()
    if where == "beside" and os.fork() != 0:
        ours.close()
        os.wait()
        return
    first(ours)


if __name__ == "__main__":
    main()
