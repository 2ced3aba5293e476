"""Two processes that share device memory, and keep the exported descriptor open, as PyTorch does
for its expandable segments: the owner twice, the other one the descriptor that it was sent.

By turns each imports the memory anew by what it kept, and works on that mapping, which must be the
same memory as the one that it has had all the time.

With ``PHOS_TEST_AHEAD`` each imports it long before it maps it; if that is more than 1, so often at
first, and then it closes the descriptors.
"""

import os
import socket
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, ok, read
from pairs import run_both
from shared_pair import POSIX, WINDOW, Rank, map_memory, properties, receive

AGAIN = 3
"""Steps after which the memory is imported again."""


class Again:
    """The memory behind a kept descriptor, imported once more, and mapped later."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._handle: Any = ok(driver.cuMemImportFromShareableHandle(descriptor, POSIX))
        self.address = 0

    def map(self) -> None:
        self.address = map_memory(self._handle, self._size)

    def end(self) -> None:
        ok(driver.cuMemUnmap(self.address, self._size))
        ok(driver.cuMemAddressFree(self.address, self._size))
        ok(driver.cuMemRelease(self._handle))


AHEAD = int(os.environ.get("PHOS_TEST_AHEAD") or 0)
ahead: list[Again] = []
"""What is imported, and not mapped yet."""


def import_all(size: int, *descriptors: int) -> None:
    """Import the memory as often as it is mapped later, if all of that is to be ahead."""
    if AHEAD > 1:
        ahead.extend(Again(descriptors[0], size) for _ in range(AHEAD))
        for each in descriptors:
            os.close(each)


def worked_on(descriptor: int, shared: int, size: int, step: int, device: Device) -> bytes:
    """What is in the memory after work on another mapping of it."""
    if AHEAD == 1 and not ahead:
        ahead.append(Again(descriptor, size))
    if step % AGAIN:
        return b""
    again = ahead.pop() if ahead else Again(descriptor, size)
    again.map()
    device.advance(again.address + (step * WINDOW) % size, WINDOW, step)
    ok(driver.cuCtxSynchronize())
    found = read(shared + (step * WINDOW) % size, 64)
    assert found == read(again.address + (step * WINDOW) % size, 64), "they are not the same memory"
    again.end()
    return found


def second(peer: socket.socket) -> None:
    device = Device()
    size = int.from_bytes(receive(peer, 8), "little")
    _, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
    shared = map_memory(ok(driver.cuMemImportFromShareableHandle(descriptor, POSIX)), size)
    rank = Rank(device, shared, size)
    import_all(size, descriptor)
    for step in range(1 << 30):
        seed = int.from_bytes(receive(peer, 8), "little")
        worked_on(descriptor, shared, size, step + 1, device)
        peer.sendall(rank.turn(step, seed))


def first(peer: socket.socket) -> None:
    report = Report()
    device = Device()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = int(ok(driver.cuMemGetAllocationGranularity(properties(), minimum)))
    handle = ok(driver.cuMemCreate(size, properties(), 0))
    shared = map_memory(handle, size)
    ok(driver.cuMemsetD8(shared, 9, size))
    descriptor = int(ok(driver.cuMemExportToShareableHandle(handle, POSIX, 0)))
    twice = os.dup(descriptor)
    peer.sendall(size.to_bytes(8, "little"))
    socket.send_fds(peer, [b"m"], [descriptor])
    rank = Rank(device, shared, size)
    import_all(size, descriptor, twice)
    for step in report.steps():
        mine = rank.turn(step, report.seed)
        mine += worked_on((descriptor, twice)[step % 2], shared, size, step, device)
        peer.sendall(mine[:8])
        theirs = receive(peer, 16)
        report.tell(step, mine + theirs + read(shared + (step * WINDOW) % size, 64))


def main() -> None:
    run_both(first, second)


if __name__ == "__main__":
    main()
