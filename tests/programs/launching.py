"""Launching the kernels of ``guesses.cu``, and memory for them to write."""

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from gpu import compile_ptx, ok, read, write

SOURCE = Path(__file__).with_name("guesses.cu")
CHUNK = 2 << 20
"""Bytes of a chunk: a block of this size is one allocation and one chunk of an image."""
WORD = 8
THREADS = 64


class Cells(ctypes.Structure):
    """As in ``guesses.cu``: ``count`` words, ``stride`` words apart."""

    _fields_ = (("words", u64), ("count", u32), ("stride", u32))


class Two(ctypes.Structure):
    """As in ``guesses.cu``."""

    _fields_ = (("ignored", u32), ("first", Cells), ("second", Cells))


class Packed(ctypes.Structure):
    """As in ``guesses.cu``."""

    _pack_ = 1
    _fields_ = (("count", u32), ("words", u64), ("stride", u32))


class Opaque(ctypes.Structure):
    """As in ``guesses.cu``."""

    _fields_ = (("parts", u64 * 16),)


class Kernels:
    """The kernels, on one device, whose primary context is made current."""

    def __init__(self, ordinal: int = 0) -> None:
        ok(driver.cuInit(0))
        self.device = ok(driver.cuDeviceGet(ordinal))
        self.context = ok(driver.cuDevicePrimaryCtxRetain(self.device))
        self.make_current()
        self.module = ok(driver.cuModuleLoadData(compile_ptx(SOURCE)))
        self._functions: dict[str, Any] = {}

    def make_current(self) -> None:
        """Use the device in the calling thread."""
        ok(driver.cuCtxSetCurrent(self.context))

    def function(self, name: str) -> Any:
        """The function of a kernel."""
        if name not in self._functions:
            self._functions[name] = ok(driver.cuModuleGetFunction(self.module, name.encode()))
        return self._functions[name]

    def launch(self, name: str, *arguments: Any, threads: int = 1, stream: Any = 0) -> None:
        """Start a kernel; ``arguments`` are ctypes values of exactly the kernel's types."""
        call = (self.function(name), blocks_for(threads), 1, 1, THREADS, 1, 1, 0, stream)
        pointers = pointers_to(arguments)
        ok(driver.cuLaunchKernel(*call, ctypes.addressof(pointers), 0))

    def launch_buffer(self, name: str, buffer: bytes, *, threads: int = 1) -> None:
        """Start a kernel whose parameters come as one buffer, in ``extra``."""
        size = ctypes.c_size_t(len(buffer))
        held = ctypes.create_string_buffer(buffer, len(buffer))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(held), 2, ctypes.addressof(size), 0)
        call = (self.function(name), blocks_for(threads), 1, 1, THREADS, 1, 1, 0, 0)
        ok(driver.cuLaunchKernel(*call, 0, ctypes.addressof(extra)))


class Other:
    """A second thread with the device, which does one thing at a time when it is told to."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._work: Callable[[], None] = lambda: None
        self._barrier = threading.Barrier(2)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._kernels.make_current()
        while True:
            self._barrier.wait()
            self._work()
            self._barrier.wait()

    def together(self, theirs: Callable[[], None], ours: Callable[[], None]) -> None:
        """Do two things at the same time."""
        self._work = theirs
        self._barrier.wait()
        ours()
        self._barrier.wait()


def blocks_for(threads: int) -> int:
    """Blocks of :data:`THREADS` threads that make at least ``threads``."""
    return -(-threads // THREADS)


def pointers_to(arguments: Sequence[Any]) -> Any:
    """What ``kernelParams`` points to; both must be kept until the launch has been made."""
    return (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))


def filled(size: int, seed: int) -> int:
    """Device memory in which no two words are the same; its address."""
    address = int(ok(driver.cuMemAlloc(size)))
    write(address, random.Random(seed).randbytes(size))
    return address


class Field:
    """Blocks of one chunk each, and which words of them each step changes: ``count`` of every
    block, ``stride`` words apart.
    """

    count = 32
    stride = CHUNK // WORD // 32

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks

    def first(self, step: int) -> int:
        """The first word of a block that the step changes."""
        return step * 10 % self.stride  # an even one, for what must be aligned to 16 bytes

    def at(self, step: int) -> list[int]:
        """The address of that word in each block."""
        return [block + WORD * self.first(step) for block in self.blocks]

    def shape(self) -> tuple[u32, u32]:
        """The arguments of that name that most kernels take."""
        return u32(self.count), u32(self.stride)

    def peek(self, step: int) -> bytes:
        """A word of each block that the step has changed, copied by the host: no kernel is told
        where the blocks are.
        """
        place = WORD * (step % self.count) * self.stride
        return b"".join(read(address + place, WORD) for address in self.at(step))
