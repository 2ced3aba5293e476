"""Stream-ordered memory of a pool that can be exported, also in a second process if
``PHOS_TEST_PEER`` is set.

The owner's allocations come and go on two streams. One stays for good, and the second process maps
it at the beginning; another one is shared anew every few steps, and freed on a stream.
``PHOS_TEST_KEPT``: the second process keeps the pool's descriptor, and imports by it again.
"""

import ctypes
import os
import socket
from collections import deque
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok, read
from pairs import run_both

POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
SIZE = 256 << 10
OPAQUE = 64
"""Bytes of what names an allocation."""
EVERY = 5
"""Steps after which another allocation is shared."""
PEER, KEPT = (os.environ.get(f"PHOS_TEST_{name}") for name in ("PEER", "KEPT"))


def make_pool() -> Any:
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.handleTypes = POSIX
    properties.maxSize = int(os.environ.get("PHOS_TEST_POOL_LIMIT", "0"))
    return ok(driver.cuMemPoolCreate(properties))


def exported(address: int) -> bytes:
    """What another process needs to import an allocation."""
    data = ok(driver.cuMemPoolExportPointer(address))
    return ctypes.string_at(data.getPtr(), OPAQUE)


def imported(pool: Any, words: bytes) -> int:
    data = driver.CUmemPoolPtrExportData()
    ctypes.memmove(data.getPtr(), words, OPAQUE)
    return int(ok(driver.cuMemPoolImportPointer(pool, data)))


def second(peer: socket.socket) -> None:
    words, descriptors, _, _ = socket.recv_fds(peer, OPAQUE, 1)
    ok(driver.cuInit(0))  # and no context yet, as the runtime does it
    pool = ok(driver.cuMemPoolImportFromShareableHandle(descriptors[0], POSIX, 0))
    common, other = imported(pool, words), 0
    device = Device()
    if not KEPT:
        os.close(descriptors[0])
    error, _ = driver.cuMemAllocFromPoolAsync(SIZE, pool, 0)
    assert int(error) != 0, "an imported pool gives no memory"
    state = State(device, cold_block=128 << 10)
    stream = ok(driver.cuStreamCreate(1))
    for step in range(1 << 30):
        message = peer.recv(8 + OPAQUE, socket.MSG_WAITALL)
        if len(message) < 8 + OPAQUE:
            os._exit(0)
        seed = int.from_bytes(message[:8], "little")
        if any(message[8:]):
            if other:  # it was in the owner's hands until the last step, and may be freed in order
                ok(driver.cuMemFreeAsync(other, stream) if step % 2 else driver.cuMemFree(other))
            if KEPT:
                pool = ok(driver.cuMemPoolImportFromShareableHandle(descriptors[0], POSIX, 0))
            other = imported(pool, message[8:])
        for address in filter(None, (common, other)):
            device.advance(address, SIZE, seed + step)
            device.fold(address, SIZE, state.total)
        peer.sendall(state.step(step, seed).ljust(16) + read(common, 16))


def first(peer: socket.socket | None) -> None:
    report = Report()
    device = Device()
    pool = make_pool()
    streams = [ok(driver.cuStreamCreate(1)) for _ in range(2)]
    common = int(ok(driver.cuMemAllocFromPoolAsync(SIZE, pool, streams[0])))
    ok(driver.cuMemsetD8Async(common, 7, SIZE, streams[0]))
    ok(driver.cuStreamSynchronize(streams[0]))
    descriptor = int(ok(driver.cuMemPoolExportToShareableHandle(pool, POSIX, 0)))
    if peer is not None:
        socket.send_fds(peer, [exported(common)], [descriptor])
    os.close(descriptor)
    state = State(device, cold_block=128 << 10)
    extra = allocate(SIZE)
    living: deque[int] = deque()
    shared, fresh = [], b""
    for step in report.steps():
        stream = streams[step % 2]
        one = int(ok(driver.cuMemAllocFromPoolAsync(SIZE * (1 + step % 3), pool, stream)))
        ok(driver.cuMemsetD8Async(one, step & 255, SIZE, stream))
        device.advance(one, SIZE, report.seed + step, stream)
        ok(driver.cuMemcpyDtoDAsync(extra, one, SIZE, stream))
        ok(driver.cuStreamSynchronize(stream))
        if step % EVERY == 0:
            shared.append(one)
            fresh = exported(one) if peer is not None else b""
        else:
            living.append(one)
        if len(living) > 6:
            ok(driver.cuMemFreeAsync(living.popleft(), stream))
        device.fold(extra, SIZE, state.total)
        device.advance(common, SIZE, report.seed + step)
        device.launch("stir", u64(state.total))
        mine = state.step(step, report.seed)
        theirs = b""
        if peer is not None:
            peer.sendall(report.seed.to_bytes(8, "little") + fresh.ljust(OPAQUE, b"\0"))
            theirs, fresh = peer.recv(32, socket.MSG_WAITALL), b""
            assert theirs[16:] == read(common, 16), "they are not the same memory"
        if len(shared) > 1:  # the second process has freed it
            ok(driver.cuMemFreeAsync(shared.pop(0), stream))
        report.tell(step, mine + theirs + read(common, 64) + read(shared[-1], 64))


def main() -> None:
    if not PEER:
        first(None)
        return
    run_both(first, second)


if __name__ == "__main__":
    main()
