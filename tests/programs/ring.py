"""Four processes in a ring over two devices, which reduce as NCCL's ranks do.

Each rank has memory that its left neighbour has mapped and writes into. In a step it computes on a
window of its own and passes its digest on; kernels wait for what arrives, add to it, and pass that
on, until each rank has something of all. No host waits for another one. The first rank prints.

With the word ``missing`` after the number of steps the last rank does nothing for as long as there
is a file ``hold``, so that all others wait for it on their devices. They say in which step.
"""

import os
import socket
import sys
import time
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok, read

RANKS = 4
ROUNDS = RANKS - 1
POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
WINDOW = 64 << 10
WINDOWS = 12
MESSAGE = 16
"""Bytes that are passed on: what :meth:`gpu.Device.fold` takes at the least."""
FLAG = 2 * ROUNDS * MESSAGE
"""Where the flag is in a rank's inbox, behind the messages of even and of odd steps."""
HOLD = Path("hold")


def _properties(device: int) -> Any:
    found = driver.CUmemAllocationProp()
    found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = device
    found.requestedHandleTypes = POSIX
    return found


def _mapped(handle: Any, size: int, device: int) -> int:
    address = int(ok(driver.cuMemAddressReserve(size, 0, 0, 0)))
    ok(driver.cuMemMap(address, size, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = _properties(device).location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(driver.cuMemSetAccess(address, size, [access], 1))
    return address


class Rank:
    """One process of the ring; ``left`` and ``right`` lead to its neighbours."""

    def __init__(self, number: int, left: socket.socket, right: socket.socket) -> None:
        ordinal = number % 2
        self._device = Device(ordinal)
        self._number = number
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = int(ok(driver.cuMemGetAllocationGranularity(_properties(ordinal), minimum)))
        inbox = ok(driver.cuMemCreate(size, _properties(ordinal), 0))
        self._inbox = _mapped(inbox, size, ordinal)
        ok(driver.cuMemsetD8(self._inbox, 0, size))
        ok(driver.cuCtxSynchronize())
        descriptor = int(ok(driver.cuMemExportToShareableHandle(inbox, POSIX, 0)))
        socket.send_fds(left, [b"m"], [descriptor])
        os.close(descriptor)
        _, descriptors, _, _ = socket.recv_fds(right, 1, 1)
        handle = ok(driver.cuMemImportFromShareableHandle(descriptors[0], POSIX))
        os.close(descriptors[0])
        self._next = _mapped(handle, size, ordinal)
        self._state = allocate(WINDOWS * WINDOW)
        self._total, self._ignored = allocate(MESSAGE), allocate(MESSAGE)
        self._stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def step(self, number: int) -> bytes:
        """One step; what it computed, of all ranks."""
        stream = self._stream
        window = self._state + number % WINDOWS * WINDOW
        self._device.advance(window, WINDOW, number * RANKS + self._number, stream)
        self._device.fold(window, WINDOW, self._total, stream)
        for turn in range(ROUNDS):
            # A rank is at most one step ahead of its right neighbour.
            slot = (number % 2 * ROUNDS + turn) * MESSAGE
            flag = u32(number * ROUNDS + turn + 1)
            ok(driver.cuMemcpyDtoDAsync(self._next + slot, self._total, MESSAGE, stream))
            self._device.launch("raise", u64(self._next + FLAG), flag, stream=stream)
            self._device.launch(
                "wait_for", u64(self._inbox + FLAG), flag, u64(self._ignored), stream=stream
            )
            self._device.fold(self._inbox + slot, MESSAGE, self._total, stream)
        self._device.launch("stir", u64(self._total), stream=stream)
        ok(driver.cuMemcpyDtoDAsync(window, self._total, 8, stream))
        if self._number == 0 and HOLD.exists():
            os.write(1, f"waits in {number}\n".encode())
        ok(driver.cuStreamSynchronize(stream))
        return read(self._total, 8)


def main() -> None:
    report = Report()
    missing = "missing" in sys.argv
    pairs = [socket.socketpair() for _ in range(RANKS)]
    number = next((each for each in range(1, RANKS) if os.fork() == 0), 0)
    rank = Rank(number, pairs[number - 1][1], pairs[number][0])
    for step in report.steps():
        if missing and number == RANKS - 1 and HOLD.exists():
            os.write(1, f"missing in {step}\n".encode())
            while HOLD.exists():
                time.sleep(0.005)
        value = rank.step(step)
        if number == 0:
            report.tell(step, value)
    os._exit(0)


if __name__ == "__main__":
    main()
