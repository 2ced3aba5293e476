"""The hook's side of a board, played by a test: fake_hook.cpp, compiled when it is first needed."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_hook.cpp")


class FakeHook:
    """A hook that has mapped a board. Chunks go by their numbers on the board."""

    def __init__(self, fd: int) -> None:
        self._board = _library().hook_open(fd)
        assert self._board, "the header does not say what the engine laid out"

    def place(self, block: int) -> tuple[int, int]:
        """(first chunk, number of chunks) of a block."""
        count = ctypes.c_uint32()
        first = _library().hook_first_chunk(self._board, block, ctypes.byref(count))
        assert first >= 0, f"block {block} is not on the board"
        return first, count.value

    def counts(self) -> list[int]:
        """Numbers of blocks, chunks, slabs, slots and kernels."""
        found = (ctypes.c_uint32 * 5)()
        _library().hook_counts(self._board, found)
        return list(found)

    def slab(self, row: int) -> tuple[int, int]:
        """(device, slots) of a slab."""
        device, slots = ctypes.c_int32(), ctypes.c_uint32()
        _library().hook_slab(self._board, row, ctypes.byref(device), ctypes.byref(slots))
        return device.value, slots.value

    def kernel(self, row: int) -> list[int]:
        """Name hash, module, flags and written words of a kernel."""
        found = (ctypes.c_uint64 * 4)()
        _library().hook_kernel(self._board, row, found)
        return list(found)

    def word(self, chunk: int) -> int:
        """A chunk's word."""
        return int(_library().hook_word(self._board, chunk))

    def set_word(self, chunk: int, value: int) -> None:
        """Scribble on a chunk's word."""
        _library().hook_set_word(self._board, chunk, value)

    def begin_shadow(self, chunk: int, slot: int) -> bool:
        """pending -> shadowing. False when the chunk was not pending."""
        return bool(_library().hook_begin_shadow(self._board, chunk, slot))

    def end_shadow(self, chunk: int) -> bool:
        """shadowing -> shadowed. False when somebody else has changed the word."""
        return bool(_library().hook_end_shadow(self._board, chunk))

    def touch(self, chunk: int) -> None:
        """Number a chunk as written."""
        _library().hook_touch(self._board, chunk)

    def urge(self, chunk: int) -> None:
        """Post a chunk as urgent."""
        _library().hook_urge(self._board, chunk)

    def await_saved(self, chunk: int, seconds: float = 20) -> bool:
        """Wait until a chunk is saved, or the job over."""
        return bool(_library().hook_await_saved(self._board, chunk, seconds))

    def free(self, block: int) -> None:
        """Post that a block was freed."""
        _library().hook_free(self._board, block)

    def await_taken(self, seconds: float = 20) -> bool:
        """Wait until the memory of all that was freed is let go of."""
        return bool(_library().hook_await_taken(self._board, seconds))

    def press(self, level: int, device: int = 0, *, abort: bool = False) -> None:
        """Ask for memory, perhaps calling the job off."""
        _library().hook_press(self._board, device, level, abort)

    def await_relief(self, seconds: float = 20, device: int = 0) -> bool:
        """Wait until what was asked for is given."""
        return bool(_library().hook_await_relief(self._board, device, seconds))

    def release_slab(self, row: int) -> None:
        """Let go of a slab."""
        _library().hook_release_slab(self._board, row)

    @property
    def phase(self) -> int:
        """The board's phase."""
        return int(_library().hook_phase(self._board))

    def count(self, *numbers: int) -> None:
        """Set the counters, the first six of ``BoardStatistics``."""
        _library().hook_count(self._board, (ctypes.c_uint64 * 6)(*numbers))

    def look(self, nanoseconds: int) -> None:
        """Count one look at a submission that took so long."""
        _library().hook_look(self._board, nanoseconds)

    def close(self) -> None:
        """Unmap the board."""
        _library().hook_close(self._board)


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the native build needs a C++ compiler, and so does this test"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "fake_hook.so")
        command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*command, _SOURCE, "-o", made], check=True)
        library = ctypes.CDLL(str(made))
    board, chunk, wide = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    yes, seconds, pointer = ctypes.c_int, ctypes.c_double, ctypes.c_void_p
    for name, result, arguments in (
        ("open", board, (ctypes.c_int,)),
        ("close", None, (board,)),
        ("first_chunk", ctypes.c_int64, (board, wide, pointer)),
        ("counts", None, (board, pointer)),
        ("slab", None, (board, chunk, pointer, pointer)),
        ("kernel", None, (board, chunk, pointer)),
        ("word", chunk, (board, chunk)),
        ("set_word", None, (board, chunk, chunk)),
        ("begin_shadow", yes, (board, chunk, chunk)),
        ("end_shadow", yes, (board, chunk)),
        ("touch", None, (board, chunk)),
        ("urge", None, (board, chunk)),
        ("await_saved", yes, (board, chunk, seconds)),
        ("free", None, (board, wide)),
        ("await_taken", yes, (board, seconds)),
        ("press", None, (board, chunk, chunk, yes)),
        ("await_relief", yes, (board, chunk, seconds)),
        ("release_slab", None, (board, chunk)),
        ("phase", chunk, (board,)),
        ("count", None, (board, pointer)),
        ("look", None, (board, wide)),
    ):
        function = getattr(library, f"hook_{name}")
        function.restype, function.argtypes = result, arguments
    return library
