"""The hook's side of a chunk map, played by a test: fake_hook.cpp, compiled when it is first
needed.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_hook.cpp")


class FakeHook:
    """A hook that has mapped a chunk map. Chunks go by their numbers in the chunk map."""

    def __init__(self, fd: int) -> None:
        self._chunk_map = _library().hook_open(fd)
        assert self._chunk_map, "the header does not say what the engine laid out"

    def place(self, block: int) -> tuple[int, int]:
        """(first chunk, number of chunks) of a block."""
        count = ctypes.c_uint32()
        first = _library().hook_first_chunk(self._chunk_map, block, ctypes.byref(count))
        assert first >= 0, f"block {block} is not in the chunk map"
        return first, count.value

    def counts(self) -> list[int]:
        """Numbers of blocks, chunks, slabs, slots and kernels."""
        found = (ctypes.c_uint32 * 5)()
        _library().hook_counts(self._chunk_map, found)
        return list(found)

    def slab(self, row: int) -> tuple[int, int]:
        """(device, slots) of a slab."""
        device, slots = ctypes.c_int32(), ctypes.c_uint32()
        _library().hook_slab(self._chunk_map, row, ctypes.byref(device), ctypes.byref(slots))
        return device.value, slots.value

    def kernel(self, row: int) -> list[int]:
        """Name hash, module, flags and written words of a kernel."""
        found = (ctypes.c_uint64 * 4)()
        _library().hook_kernel(self._chunk_map, row, found)
        return list(found)

    def word(self, chunk: int) -> int:
        """A chunk's word."""
        return int(_library().hook_word(self._chunk_map, chunk))

    def set_word(self, chunk: int, value: int) -> None:
        """Scribble on a chunk's word."""
        _library().hook_set_word(self._chunk_map, chunk, value)

    def begin_shadow(self, chunk: int, slot: int) -> bool:
        """pending -> shadowing. False when the chunk was not pending."""
        return bool(_library().hook_begin_shadow(self._chunk_map, chunk, slot))

    def end_shadow(self, chunk: int) -> bool:
        """shadowing -> shadowed. False when somebody else has changed the word."""
        return bool(_library().hook_end_shadow(self._chunk_map, chunk))

    def touch(self, chunk: int) -> None:
        """Number a chunk as written."""
        _library().hook_touch(self._chunk_map, chunk)

    def urge(self, chunk: int) -> None:
        """Post a chunk as urgent."""
        _library().hook_urge(self._chunk_map, chunk)

    def await_saved(self, chunk: int, seconds: float = 20) -> bool:
        """Wait until a chunk is saved, or the job over."""
        return bool(_library().hook_await_saved(self._chunk_map, chunk, seconds))

    def free(self, block: int) -> None:
        """Post that a block was freed."""
        _library().hook_free(self._chunk_map, block)

    def await_taken(self, seconds: float = 20) -> bool:
        """Wait until the memory of all that was freed is let go of."""
        return bool(_library().hook_await_taken(self._chunk_map, seconds))

    def press(self, level: int, device: int = 0, *, abort: bool = False) -> None:
        """Ask for memory, perhaps calling the job off."""
        _library().hook_press(self._chunk_map, device, level, abort)

    def await_relief(self, seconds: float = 20, device: int = 0) -> bool:
        """Wait until what was asked for is given."""
        return bool(_library().hook_await_relief(self._chunk_map, device, seconds))

    def release_slab(self, row: int) -> None:
        """Let go of a slab."""
        _library().hook_release_slab(self._chunk_map, row)

    @property
    def phase(self) -> int:
        """The chunk map's phase."""
        return int(_library().hook_phase(self._chunk_map))

    def count(self, *numbers: int) -> None:
        """Set the counters, the first six of ``BoardStatistics``."""
        _library().hook_count(self._chunk_map, (ctypes.c_uint64 * 6)(*numbers))

    def look(self, nanoseconds: int) -> None:
        """Count one look at a submission that took so long."""
        _library().hook_look(self._chunk_map, nanoseconds)

    def close(self) -> None:
        """Unmap the chunk map."""
        _library().hook_close(self._chunk_map)


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the native build needs a C++ compiler, and so does this test"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "fake_hook.so")
        command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*command, _SOURCE, "-o", made], check=True)
        library = ctypes.CDLL(str(made))
    chunk_map, chunk, wide = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    yes, seconds, pointer = ctypes.c_int, ctypes.c_double, ctypes.c_void_p
    for name, result, arguments in (
        ("open", chunk_map, (ctypes.c_int,)),
        ("close", None, (chunk_map,)),
        ("first_chunk", ctypes.c_int64, (chunk_map, wide, pointer)),
        ("counts", None, (chunk_map, pointer)),
        ("slab", None, (chunk_map, chunk, pointer, pointer)),
        ("kernel", None, (chunk_map, chunk, pointer)),
        ("word", chunk, (chunk_map, chunk)),
        ("set_word", None, (chunk_map, chunk, chunk)),
        ("begin_shadow", yes, (chunk_map, chunk, chunk)),
        ("end_shadow", yes, (chunk_map, chunk)),
        ("touch", None, (chunk_map, chunk)),
        ("urge", None, (chunk_map, chunk)),
        ("await_saved", yes, (chunk_map, chunk, seconds)),
        ("free", None, (chunk_map, wide)),
        ("await_taken", yes, (chunk_map, seconds)),
        ("press", None, (chunk_map, chunk, chunk, yes)),
        ("await_relief", yes, (chunk_map, chunk, seconds)),
        ("release_slab", None, (chunk_map, chunk)),
        ("phase", chunk, (chunk_map,)),
        ("count", None, (chunk_map, pointer)),
        ("look", None, (chunk_map, wide)),
    ):
        function = getattr(library, f"hook_{name}")
        function.restype, function.argtypes = result, arguments
    return library
