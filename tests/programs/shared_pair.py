"""Two processes that share device memory through an exported handle, as NCCL's ranks do.

The first owns the memory and prints; the second imported it. They take turns on it, and each has a
state of its own.
"""

import os
import socket
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, State, ok, read
from pairs import run_both

POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
WINDOW = 128 << 10


def properties() -> Any:
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    prop.requestedHandleTypes = POSIX
    return prop


def map_memory(handle: Any, size: int) -> int:
    """Map a handle for the device; the address."""
    address = int(ok(driver.cuMemAddressReserve(size, 0, 0, 0)))
    ok(driver.cuMemMap(address, size, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = properties().location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(driver.cuMemSetAccess(address, size, [access], 1))
    return address


class Rank:
    """One process: a state of its own, and its share of the common memory."""

    def __init__(self, device: Device, shared: int, size: int) -> None:
        self._device, self._shared, self._size = device, shared, size
        self._state = State(device, cold_block=128 << 10)

    def turn(self, step: int, seed: int) -> bytes:
        address = self._shared + (step * WINDOW) % self._size
        self._device.advance(address, WINDOW, seed)
        self._device.fold(address, WINDOW, self._state.total)
        self._device.launch("stir", u64(self._state.total))
        return self._state.step(step, seed)


def receive(peer: socket.socket, size: int) -> bytes:
    """``size`` bytes, or the end of the process: its peer is gone."""
    data: bytes = peer.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        os._exit(0)
    return data


def second(peer: socket.socket) -> None:
    device = Device()
    size = int.from_bytes(receive(peer, 8), "little")
    _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    handle = ok(driver.cuMemImportFromShareableHandle(descriptors[0], POSIX))
    os.close(descriptors[0])
    rank = Rank(device, map_memory(handle, size), size)
    step = 0
    while True:
        seed = int.from_bytes(receive(peer, 8), "little")
        peer.sendall(rank.turn(step, seed))
        step += 1


def first(peer: socket.socket) -> None:
    report = Report()
    device = Device()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = int(ok(driver.cuMemGetAllocationGranularity(properties(), minimum)))
    handle = ok(driver.cuMemCreate(size, properties(), 0))
    shared = map_memory(handle, size)
    ok(driver.cuMemsetD8(shared, 9, size))
    descriptor = int(ok(driver.cuMemExportToShareableHandle(handle, POSIX, 0)))
    peer.sendall(size.to_bytes(8, "little"))
    socket.send_fds(peer, [b"m"], [descriptor])
    os.close(descriptor)
    rank = Rank(device, shared, size)
    for step in report.steps():
        mine = rank.turn(step, report.seed)
        peer.sendall(mine[:8])
        theirs = receive(peer, 16)
        report.tell(step, mine + theirs + read(shared + (step * WINDOW) % size, 64))


def main() -> None:
    run_both(first, second)


if __name__ == "__main__":
    main()
