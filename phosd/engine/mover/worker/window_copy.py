"""Copy records between packs and the device through the windows of a slot, by window_copy.h."""

import ctypes
import functools
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from phosd.engine.chunk_map import chunk_map
from phosd.engine.image.packs import FIELDS, PAGE
from phosd.engine.mover.worker.pinned_packs import PinnedPack
from phosd.engine.mover.worker.ring import Slot
from phosd.engine.system import cuda
from phosd.errors import ImageCorrupt

BAD = "the image cannot be restored; `phos verify` tells whether the disk is at fault"


class _Result(IntEnum):
    DONE = 0
    END = 1
    ERROR = 2
    COPY_ROWS = 3
    COPY_OUT = 4
    RECORD = 5
    SYNCHRONIZE = 6


_FUNCTIONS = {
    _Result.COPY_ROWS: "cuMemcpy2DAsync",
    _Result.COPY_OUT: "cuMemcpyDtoHAsync",
    _Result.RECORD: "cuEventRecord",
    _Result.SYNCHRONIZE: "cuEventSynchronize",
}


class _Window(ctypes.Structure):
    _fields_ = [("host", ctypes.c_void_p), ("event", ctypes.c_void_p)]


class _Record(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("address", "offset", "length")]


class _Outcome(ctypes.Structure):
    _fields_ = [("result", ctypes.c_uint32), ("code", ctypes.c_int32), ("offset", ctypes.c_uint64)]


class _Request(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("copy_rows", "copy_out", "record", "synchronize")),
        *((name, ctypes.c_void_p) for name in ("stream", "windows")),
        *((name, ctypes.c_uint32) for name in ("window_count", "window_records")),
        *((name, ctypes.c_int32) for name in ("buffered", "direct")),
        ("first", ctypes.c_uint64),
    ]


class _In(_Request):
    _fields_ = [
        ("pinned", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("records", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
    ]


class _Out(_Request):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "offset")),
        ("sizes", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("fields", ctypes.c_char_p),
        ("field_bytes", ctypes.c_uint64),
    ]


class WindowedPack:
    """A pack to copy from or to: by its descriptor ``buffered``, and by ``direct`` if that is not
    negative. One that is ``pinned`` is read where it is; another one through the page cache if its
    bytes are there. ``what`` names it in errors.
    """

    def __init__(
        self, what: str, buffered: int, direct: int, pinned: PinnedPack | None = None
    ) -> None:
        self._what = what
        self._buffered = buffered
        self._direct = direct
        self._pinned = pinned

    @property
    def is_pinned(self) -> bool:
        """Whether the device reads it where it is."""
        return self._pinned is not None

    def copy_in(
        self, records: Sequence[tuple[int, int, int]], slot: Slot, *, short: bool = False
    ) -> None:
        """Copy the chunks of consecutive records into device memory, each (device address, offset
        of the record, bytes of the chunk). Returns when they are there.

        Raises :class:`ImageCorrupt` at the end of the file. ``short``: the first read moves a page.
        """
        rows = (_Record * len(records))(*(_Record(*record) for record in records))
        pinned = self._pinned
        at, size = (pinned.address, len(pinned.view)) if pinned else (None, 0)
        self._do(_In, slot, short, at, size, ctypes.addressof(rows), len(rows))

    def copy_out(
        self,
        address: int,
        offset: int,
        sizes: Sequence[int],
        fields: Sequence[bytes],
        slot: Slot,
        *,
        short: bool = False,
    ) -> None:
        """Copy records at a device address to ``offset``. They have these sizes in bytes, and get
        headers of these fields. Returns when they are written. Raises :class:`OSError`.
        """
        each = (ctypes.c_uint64 * len(sizes))(*sizes)
        rows = (ctypes.addressof(each), len(each), b"".join(fields), FIELDS)
        self._do(_Out, slot, short, address, offset, *rows)

    def write(self, view: memoryview, offset: int, *, short: bool = False) -> None:
        """Write host memory to ``offset``. Raises :class:`OSError`."""
        fd = self._direct if self._direct >= 0 else self._buffered
        done = 0
        while done < len(view):
            part = view[done : done + PAGE] if short else view[done:]
            short = False
            done += os.pwrite(fd, part, offset + done)

    def _do(self, kind: type[_In] | type[_Out], slot: Slot, short: bool, *rest: Any) -> None:
        windows = (_Window * len(slot.windows))(
            *(_Window(window.host, int(window.event)) for window in slot.windows)
        )
        request = kind(
            *_functions(),
            *(int(slot.stream), ctypes.addressof(windows)),
            *(len(windows), slot.windows[0].records),
            *(self._buffered, self._direct, PAGE if short else 0),
            *rest,
        )
        outcome = _Outcome()
        function = _library().phos_copy_in if kind is _In else _library().phos_copy_out
        function(ctypes.byref(request), ctypes.byref(outcome))
        match _Result(outcome.result):
            case _Result.DONE:
                return
            case _Result.END:
                raise ImageCorrupt(f"{self._what} ends at {outcome.offset}", hint=BAD)
            case _Result.ERROR:
                raise OSError(outcome.code, os.strerror(outcome.code), self._what)
            case failed:
                cuda.check(_FUNCTIONS[failed], outcome.code, about=f"a copy of {self._what}")


@functools.cache
def _functions() -> tuple[int, ...]:
    """Return the addresses of the driver's functions."""
    version = cuda.driver_version()
    return tuple(
        int(cuda.call("cuGetProcAddress", name.encode(), version, 0)[0])
        for name in _FUNCTIONS.values()
    )


@functools.cache
def _library() -> ctypes.CDLL:
    found = chunk_map.library()
    for function in (found.phos_copy_in, found.phos_copy_out):
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return found
