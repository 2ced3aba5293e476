"""What two ranks do that compute on each other's values and meet on the device alone.

At each step a rank posts its window, raises its flag, and has a kernel spin for the other's flag.
No host waits for the other rank's host: a rank that is held leaves a kernel of the other spinning.
"""

from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64

from cuda.bindings import driver
from gpu import Device, allocate, ok, read

WINDOW = 32 << 10
BOARD = 2 * (2 * WINDOW + 256)
"""Bytes that both ranks see: for each its flag, and its windows of even and of odd steps."""


class Rank:
    """One of the two; ``chunk_map`` is the address of the zeroed memory that both see."""

    def __init__(
        self, device: Device, chunk_map: int, number: int, *, copies: bool = False
    ) -> None:
        """``copies``: a copy waits for each step, and keeps other threads from launching."""
        self._device = device
        self._copies = copies
        self._mine, self._theirs = (chunk_map + n * BOARD // 2 for n in (number, 1 - number))
        self._window = allocate(WINDOW)
        self._total = allocate(16)
        self._ignored = allocate(16)
        flags = driver.CUstream_flags
        flag = flags.CU_STREAM_DEFAULT if copies else flags.CU_STREAM_NON_BLOCKING
        self._stream = ok(driver.cuStreamCreate(flag))

    def step(self, number: int, seed: int) -> bytes:
        """One step; what it computed. The kernels on the way wait for those of the other rank."""
        slot = 256 + number % 2 * WINDOW
        self._device.advance(self._window, WINDOW, seed, self._stream)
        ok(driver.cuMemcpyDtoDAsync(self._mine + slot, self._window, WINDOW, self._stream))
        self._device.launch("raise", u64(self._mine), u32(number + 1), stream=self._stream)
        self._device.launch(
            "wait_for", u64(self._theirs), u32(number + 1), u64(self._ignored), stream=self._stream
        )
        self._device.fold(self._theirs + slot, WINDOW, self._total, self._stream)
        self._device.launch("stir", u64(self._total), stream=self._stream)
        ok(driver.cuMemcpyDtoDAsync(self._window, self._total, 8, self._stream))
        if not self._copies:
            ok(driver.cuStreamSynchronize(self._stream))
        return read(self._total, 8)
