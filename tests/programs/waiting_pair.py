"""Two processes whose kernels spin for each other, in memory that both have mapped.

With the word ``copies`` after the number of steps they wait for their devices by copying.
"""

import os
import socket
import sys
import threading

from cuda.bindings import driver
from exchange import Rank
from gpu import Device, Report, ok
from pairs import run_both
from shared_pair import POSIX, map_memory, properties, receive


def end_with(peer: socket.socket) -> None:
    """End this process when its peer ends."""
    receive(peer, 1)


def second(peer: socket.socket) -> None:
    report = Report()
    device = Device()
    size = int.from_bytes(receive(peer, 8), "little")
    _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    handle = ok(driver.cuMemImportFromShareableHandle(descriptors[0], POSIX))
    os.close(descriptors[0])
    threading.Thread(target=end_with, args=(peer,), daemon=True).start()
    rank = Rank(device, map_memory(handle, size), 1, copies="copies" in sys.argv)
    for step in report.steps():
        rank.step(step, step)
    os._exit(0)


def first(peer: socket.socket) -> None:
    report = Report()
    device = Device()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = int(ok(driver.cuMemGetAllocationGranularity(properties(), minimum)))
    handle = ok(driver.cuMemCreate(size, properties(), 0))
    chunk_map = map_memory(handle, size)
    ok(driver.cuMemsetD8(chunk_map, 0, size))
    ok(driver.cuCtxSynchronize())
    descriptor = int(ok(driver.cuMemExportToShareableHandle(handle, POSIX, 0)))
    peer.sendall(size.to_bytes(8, "little"))
    socket.send_fds(peer, [b"m"], [descriptor])
    os.close(descriptor)
    rank = Rank(device, chunk_map, 0, copies="copies" in sys.argv)
    for step in report.steps():
        report.tell(step, rank.step(step, report.seed))
    os.wait()


def main() -> None:
    run_both(first, second)


if __name__ == "__main__":
    main()
