"""Four processes in a ring over two devices, which reduce as NCCL's ranks do.

Each rank has memory that its left neighbour has mapped and writes into. In a step it computes on a
window of its own and passes its digest on; kernels wait for what arrives, add to it, and pass that
on, until each rank has something of all. No host waits for another one. The first rank prints.

Words after the number of steps:

``missing``: the last rank does nothing for as long as there is a file ``hold``, so that all others
wait for it on their devices. They say in which step.

``revoked``: before step ``REVOKED`` each rank revokes access that it needs (:meth:`Rank.revoke`),
for as long as there is a file ``hold``.

``apart``: each rank is a process tree of its own, below a process that waits for their end.

``asks``: after step ``ASKED`` each rank asks for a checkpoint of itself.

``passes``: after each step each rank comes to a safe point.

``user``, ``bare``, ``boxed``: the last rank is another user's, runs without the hook, or is in a
mount namespace of its own.
"""

import ctypes
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
WRITABLE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NONE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
WINDOW = 64 << 10
WINDOWS = 12
MESSAGE = 16
"""Bytes that are passed on: what :meth:`gpu.Device.fold` takes at the least."""
FLAG = 2 * ROUNDS * MESSAGE
"""Where the flag is in a rank's inbox, behind the messages of even and of odd steps."""
HOLD = Path("hold")
REVOKED = 3
ASKED = 6
"""The step before which access is taken away."""
NOBODY = 65534
_NEW_MOUNTS = 0x20000
"""``CLONE_NEWNS`` of ``unshare(2)``."""
_DUMPABLE = 4
"""``PR_SET_DUMPABLE`` of ``prctl(2)``."""


def _properties(device: int) -> Any:
    found = driver.CUmemAllocationProp()
    found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = device
    found.requestedHandleTypes = POSIX
    return found


class Shared:
    """Memory that two ranks share, mapped for one device."""

    def __init__(self, handle: Any, size: int, device: int) -> None:
        self._handle, self._size, self._device = handle, size, device
        self.address = int(ok(driver.cuMemAddressReserve(size, 0, 0, 0)))
        self.map()

    def map(self) -> None:
        ok(driver.cuMemMap(self.address, self._size, 0, self._handle, 0))
        self.allow(WRITABLE)

    def unmap(self) -> None:
        ok(driver.cuMemUnmap(self.address, self._size))

    def allow(self, flags: Any) -> None:
        """Give the device this access."""
        access = driver.CUmemAccessDesc()
        access.location = _properties(self._device).location
        access.flags = flags
        ok(driver.cuMemSetAccess(self.address, self._size, [access], 1))

    def allowed(self) -> int:
        """The access that the device has."""
        return int(ok(driver.cuMemGetAccess(_properties(self._device).location, self.address)))


class Rank:
    """One process of the ring; ``left`` and ``right`` lead to its neighbours until they share."""

    def __init__(self, number: int, left: socket.socket, right: socket.socket) -> None:
        ordinal = number % 2
        self._device = Device(ordinal)
        self._number = number
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = int(ok(driver.cuMemGetAllocationGranularity(_properties(ordinal), minimum)))
        inbox = ok(driver.cuMemCreate(size, _properties(ordinal), 0))
        self._inbox = Shared(inbox, size, ordinal)
        ok(driver.cuMemsetD8(self._inbox.address, 0, size))
        ok(driver.cuCtxSynchronize())
        descriptor = int(ok(driver.cuMemExportToShareableHandle(inbox, POSIX, 0)))
        socket.send_fds(left, [b"m"], [descriptor])
        os.close(descriptor)
        _, descriptors, _, _ = socket.recv_fds(right, 1, 1)
        handle = ok(driver.cuMemImportFromShareableHandle(descriptors[0], POSIX))
        os.close(descriptors[0])
        self._next = Shared(handle, size, ordinal)
        self._state = allocate(WINDOWS * WINDOW)
        self._total, self._ignored = allocate(MESSAGE), allocate(MESSAGE)
        self._stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def step(self, number: int) -> bytes:
        """One step; what it computed, of all ranks."""
        stream, inbox, there = self._stream, self._inbox.address, self._next.address
        window = self._state + number % WINDOWS * WINDOW
        self._device.advance(window, WINDOW, number * RANKS + self._number, stream)
        self._device.fold(window, WINDOW, self._total, stream)
        for turn in range(ROUNDS):
            # A rank is at most one step ahead of its right neighbour.
            slot = (number % 2 * ROUNDS + turn) * MESSAGE
            flag = u32(number * ROUNDS + turn + 1)
            ok(driver.cuMemcpyDtoDAsync(there + slot, self._total, MESSAGE, stream))
            self._device.launch("raise", u64(there + FLAG), flag, stream=stream)
            self._device.launch(
                "wait_for", u64(inbox + FLAG), flag, u64(self._ignored), stream=stream
            )
            self._device.fold(inbox + slot, MESSAGE, self._total, stream)
        self._device.launch("stir", u64(self._total), stream=stream)
        ok(driver.cuMemcpyDtoDAsync(window, self._total, 8, stream))
        if self._number == 0 and HOLD.exists():
            os.write(1, f"waits in {number}\n".encode())
        ok(driver.cuStreamSynchronize(stream))
        return read(self._total, 8)

    def revoke(self) -> None:
        """Revoke the device's access to the rank's own memory (the first rank), or to that of its
        neighbour, which rank 2 unmaps. Grant it again when there is no file ``hold``.

        Raises RuntimeError if the access is not what it was then.
        """
        memory = self._next if self._number else self._inbox
        unmaps = self._number == 2
        if unmaps:
            memory.unmap()
        else:
            memory.allow(NONE)
        os.write(1, f"rank {self._number} has no access\n".encode())
        while HOLD.exists():
            time.sleep(0.005)
        if unmaps:
            memory.map()
            return
        if memory.allowed() != int(NONE):
            raise RuntimeError(f"rank {self._number} has been given access {memory.allowed()}")
        memory.allow(WRITABLE)


def run(number: int, left: socket.socket, right: socket.socket) -> None:
    """The life of a rank."""
    report = Report()
    rank = Rank(number, left, right)
    left.close()
    right.close()
    held = False
    for step in report.steps():
        if "revoked" in sys.argv and step == REVOKED:
            rank.revoke()
        if "missing" in sys.argv and number == RANKS - 1:
            # One step later than it is seen: only then the others see it before they wait.
            if held:
                os.write(1, f"missing in {step}\n".encode())
                while HOLD.exists():
                    time.sleep(0.005)
            held = HOLD.exists()
        value = rank.step(step)
        if number == 0:
            report.tell(step, value)
        if "asks" in sys.argv and step == ASKED:
            from phosd import program

            os.write(1, f"# rank {number} {program.checkpoint()}\n".encode())
        if "passes" in sys.argv:
            from phosd import program

            if passed := program.safe_point():
                os.write(1, f"# rank {number} {passed} {step}\n".encode())
    os._exit(0)


def become_strange(left: socket.socket, right: socket.socket) -> None:
    """What the last rank is besides."""
    libc = ctypes.CDLL(None)
    if "boxed" in sys.argv and libc.unshare(_NEW_MOUNTS) != 0:
        raise OSError("no mount namespace")
    if "user" in sys.argv:
        os.environ.pop("PHOS_TEST_CACHE", None)  # nobody replaces files of others in it
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        libc.prctl(_DUMPABLE, 1)  # as after an exec, which this user's rights may not allow
    if "bare" in sys.argv:
        os.environ.pop("LD_PRELOAD", None)
        for each in (left, right):
            each.set_inheritable(True)
        ends = (str(left.fileno()), str(right.fileno()))
        os.execv(sys.executable, [sys.executable, *sys.argv[:2], "last", *ends])


def main() -> None:
    if "last" in sys.argv:
        left, right = (socket.socket(fileno=int(end)) for end in sys.argv[-2:])
        run(RANKS - 1, left, right)
    pairs = [socket.socketpair() for _ in range(RANKS)]
    apart = "apart" in sys.argv
    forked = range(RANKS) if apart else range(1, RANKS)
    number = next((each for each in forked if os.fork() == 0), None if apart else 0)
    if number is None:
        for _ in forked:
            os.wait()
        return
    if apart:
        os.setsid()
    left, right = pairs[number - 1][1], pairs[number][0]
    for pair in pairs:
        for end in pair:
            if end not in (left, right):
                end.close()
    if number == RANKS - 1:
        become_strange(left, right)
    run(number, left, right)


if __name__ == "__main__":
    main()
