"""What the target programs share: a device, its kernels, and a report of all that was computed.

The programs know nothing of phosd. Each runs for as many steps as its first argument says, and for
ever when that is 0 or missing. It prints one line a step, ``<step> <hex digest>``, where the digest
depends on everything that the program ever computed, on the GPU and on the CPU.

Environment: ``PHOS_TEST_PACE``, seconds to rest after a step (default 0.02); ``PHOS_TEST_CACHE``, a
folder for the compiled kernels.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from pathlib import Path
from typing import Any

from cuda.bindings import driver, nvrtc

SOURCE = Path(__file__).with_name("kernels.cu")
KERNELS = ("advance", "fold", "stir", "wait_for", "raise")
PACE = float(os.environ.get("PHOS_TEST_PACE", "0.02"))
THREADS = 128
"""Threads of a block; ``fold`` needs exactly these."""


def ok(result: tuple[Any, ...]) -> Any:
    """The values of a CUDA call, or an error that names what the call answered."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA answered {error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def compile_ptx(source: Path) -> bytes:
    """PTX of a CUDA C file, compiled once per cache folder."""
    text = source.read_bytes()
    folder = os.environ.get("PHOS_TEST_CACHE")
    name = f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.ptx"
    if folder and (Path(folder) / name).exists():
        return (Path(folder) / name).read_bytes()
    program: Any = ok(nvrtc.nvrtcCreateProgram(text, source.name.encode(), 0, [], []))
    options = [b"--gpu-architecture=compute_75", b"--fmad=false"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        log = b" " * int(ok(nvrtc.nvrtcGetProgramLogSize(program)))
        ok(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    ptx = b" " * int(ok(nvrtc.nvrtcGetPTXSize(program)))
    ok(nvrtc.nvrtcGetPTX(program, ptx))
    if folder:
        draft = Path(folder) / f"{name}.{os.getpid()}"
        draft.write_bytes(ptx)
        draft.rename(Path(folder) / name)
    return ptx


class Device:
    """One GPU: its primary context, made current, and the kernels of ``kernels.cu``."""

    def __init__(self, ordinal: int = 0) -> None:
        ok(driver.cuInit(0))
        self.ordinal = ordinal
        self.handle = ok(driver.cuDeviceGet(ordinal))
        self.context = ok(driver.cuDevicePrimaryCtxRetain(self.handle))
        self.make_current()
        self.module = ok(driver.cuModuleLoadData(compile_ptx(SOURCE)))
        # All at once: a driver that loads lazily would wait for a kernel that waits for another.
        self._functions = {
            name: ok(driver.cuModuleGetFunction(self.module, name.encode())) for name in KERNELS
        }

    def make_current(self) -> None:
        """Use this device in the calling thread."""
        ok(driver.cuCtxSetCurrent(self.context))

    def launch(
        self, name: str, *arguments: u32 | u64, blocks: int = 1, threads: int = 1, stream: Any = 0
    ) -> None:
        """Start a kernel; the types of the arguments are the kernel's."""
        values = tuple(a.value for a in arguments), tuple(type(a) for a in arguments)
        function = self._functions[name]
        ok(driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, values, 0))

    def advance(self, address: int, size: int, seed: int, stream: Any = 0) -> None:
        """Compute on ``size`` bytes (a multiple of 16), in place."""
        count = size // 16
        blocks = min(32, -(-count // THREADS))
        self.launch(
            "advance", u64(address), u32(count), u64(seed),
            blocks=blocks, threads=THREADS, stream=stream,
        )  # fmt: skip

    def fold(self, address: int, size: int, total: int, stream: Any = 0) -> None:
        """Add a digest of ``size`` bytes (a multiple of 16) to the 64-bit word at ``total``."""
        count = size // 16
        blocks = min(32, -(-count // THREADS))
        self.launch(
            "fold", u64(address), u32(count), u64(total),
            blocks=blocks, threads=THREADS, stream=stream,
        )  # fmt: skip


def allocate(size: int) -> int:
    """Zeroed device memory; the address."""
    address = int(ok(driver.cuMemAlloc(size)))
    ok(driver.cuMemsetD8(address, 0, size))
    ok(driver.cuCtxSynchronize())
    return address


def read(address: int, size: int) -> bytes:
    """Device memory, after everything that was started before."""
    out = bytearray(size)
    ok(driver.cuMemcpyDtoH(out, address, size))
    return bytes(out)


def write(address: int, data: bytes) -> None:
    """Copy ``data`` to device memory."""
    ok(driver.cuMemcpyHtoD(address, data, len(data)))


class State:
    """Device memory that remembers: all of it enters the digest within ``PERIOD`` steps.

    The hot part is computed on by kernels, a window a step; of the cold part one block a step is
    read back, hashed and changed by the host.
    """

    PERIOD = 12
    WINDOW = 96 << 10

    def __init__(self, device: Device, cold_block: int = 1 << 20) -> None:
        self.device = device
        self.hot = allocate(self.PERIOD * self.WINDOW)
        self.cold_block = cold_block
        self.cold = [allocate(cold_block) for _ in range(self.PERIOD)]
        for number, block in enumerate(self.cold):
            ok(driver.cuMemsetD32(block, 0x01010101 * number, cold_block // 4))
        self.total = allocate(16)

    def window(self, number: int) -> int:
        """The address of what step ``number`` computes on: ``WINDOW`` bytes."""
        return self.hot + (number % self.PERIOD) * self.WINDOW

    def step(self, number: int, seed: int, stream: Any = 0) -> bytes:
        """One step; what it computed. The stream is synchronized."""
        address = self.window(number)
        self.device.advance(address, self.WINDOW, seed, stream)
        self.device.fold(address, self.WINDOW, self.total, stream)
        self.device.launch("stir", u64(self.total), stream=stream)
        ok(driver.cuStreamSynchronize(stream))
        block = self.cold[number % self.PERIOD]
        cold = hashlib.blake2b(read(block, self.cold_block), digest_size=8).digest()
        write(block + 64 * (number % (self.cold_block // 64)), cold)
        return read(self.total, 8) + cold


class Report:
    """The lines that a program prints, and the hash over everything behind them."""

    def __init__(self) -> None:
        self._limit = int(sys.argv[1]) if len(sys.argv) > 1 else 0
        self._hash = hashlib.blake2b(digest_size=8)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, up to the program's first argument; without one or with 0,
        for ever."""
        number = 0
        while self._limit == 0 or number < self._limit:
            yield number
            number += 1

    @property
    def seed(self) -> int:
        """A 64-bit number that depends on everything told so far."""
        return int.from_bytes(self._hash.digest(), "little")

    @property
    def digest(self) -> str:
        """The digest of all that was told so far."""
        return self._hash.hexdigest()

    def tell(self, step: int, computed: bytes) -> None:
        """Print the line of a step in one write, then rest."""
        self._hash.update(computed)
        os.write(1, f"{step} {self.digest}\n".encode())
        time.sleep(PACE)
