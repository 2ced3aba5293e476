"""A folder whose file system answers nothing any more when told so, as a lost server's does.

``with hanging_folder(path) as server: ... server.hang()``. Files in it are kept in memory; every
user may use it, and nothing is cached. At the end of the block all calls that still wait fail.
"""

import contextlib
import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import pytest

_ROOT = 1
_DETACH = 2
_BUFFER = 1 << 20
_HEADER = struct.Struct("<IIQQIIII")
_libc = ctypes.CDLL(None, use_errno=True)


class _Call(IntEnum):
    """Calls of the kernel, as in ``linux/fuse.h``."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    RELEASEDIR = 29
    INTERRUPT = 36
    CREATE = 35
    BATCH_FORGET = 42


class HangingFolder:
    """The running server."""

    def answer(self) -> None:
        """Answer what was asked meanwhile, and everything from now on."""
        self._server.send_signal(signal.SIGUSR2)

    def __init__(self, server: "subprocess.Popen[bytes]") -> None:
        self._server = server

    def hang(self) -> None:
        """Answer nothing from now on. A process that asks then cannot even be killed."""
        self._server.send_signal(signal.SIGUSR1)


@contextmanager
def hanging_folder(path: Path, user: int | None = None) -> Iterator[HangingFolder]:
    """Mount the file system at ``path`` until the end of the block, for everybody or one user
    alone. Skips the test where root may not: a container without ``/dev/fuse``.
    """
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except (FileNotFoundError, PermissionError):
        pytest.skip("there is no FUSE here")
    who = "user_id=0,group_id=0,allow_other" if user is None else f"user_id={user},group_id={user}"
    options = f"fd={device},rootmode=40777,{who}"
    words = [b"phos-test", bytes(path), b"fuse", 0, options.encode()]
    try:
        if _libc.mount(*words) != 0:
            code = ctypes.get_errno()
            if code == errno.EPERM:
                pytest.skip("this root may not mount")
            raise OSError(code, f"cannot mount FUSE at {path}: {os.strerror(code)}")
        server = subprocess.Popen([sys.executable, __file__, str(device)], pass_fds=[device])
    finally:
        os.close(device)
    try:
        yield HangingFolder(server)
    finally:
        server.kill()  # the kernel ends all calls when nobody has its end of the device
        server.wait()
        _libc.umount2(bytes(path), _DETACH)


@dataclass
class _File:
    """A file, or the folder itself."""

    mode: int
    data: bytearray = field(default_factory=bytearray)
    uid: int = 0
    written: int = 0
    """When, in nanoseconds since the epoch."""


class _Server:
    def __init__(self, device: int) -> None:
        self._device = device
        self._files: dict[int, _File] = {_ROOT: _File(stat.S_IFDIR | 0o777)}
        self._names: dict[bytes, int] = {}
        self._silent = False
        self._waiting: list[bytes] = []
        self._answers: dict[int, Callable[[int, int, bytes], bytes]] = {
            _Call.INIT: lambda node, uid, words: struct.pack(
                "<IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 65536, 1, 0, 0, 0
            ),
            _Call.LOOKUP: self._look_up,
            _Call.GETATTR: lambda node, uid, words: self._attributes(node),
            _Call.SETATTR: self._set,
            _Call.OPEN: lambda node, uid, words: bytes(16),
            _Call.OPENDIR: lambda node, uid, words: bytes(16),
            _Call.CREATE: self._create,
            _Call.MKDIR: self._make_folder,
            _Call.READ: self._read,
            _Call.WRITE: self._write,
            _Call.STATFS: lambda node, uid, words: struct.pack(
                "<5Q4I24x", *[0] * 5, 4096, 255, 0, 0
            ),
            _Call.RELEASE: lambda node, uid, words: b"",
            _Call.RELEASEDIR: lambda node, uid, words: b"",
            _Call.FLUSH: lambda node, uid, words: b"",
        }

    def serve(self) -> None:
        signal.signal(signal.SIGUSR1, self._hang)
        signal.signal(signal.SIGUSR2, self._go_on)
        while True:
            request = os.read(self._device, _BUFFER + 4096)
            if self._silent:
                self._waiting.append(request)
            else:
                self._answer(request)

    def _hang(self, *_: object) -> None:
        self._silent = True

    def _go_on(self, *_: object) -> None:
        self._silent = False
        while self._waiting:
            self._answer(self._waiting.pop(0))

    def _answer(self, request: bytes) -> None:
        _, call, unique, node, uid, *_ = _HEADER.unpack_from(request)
        if call in (_Call.FORGET, _Call.BATCH_FORGET, _Call.INTERRUPT):
            return
        error, answer = 0, b""
        try:
            if call not in self._answers:
                raise OSError(errno.ENOSYS, "not here")
            answer = self._answers[call](node, uid, request[_HEADER.size :])
        except OSError as failure:
            error = -(failure.errno or errno.EIO)
        with contextlib.suppress(FileNotFoundError):  # who asked has been killed meanwhile
            os.write(self._device, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)

    def _plain(self, node: int) -> bytes:
        file = self._files[node]
        seconds, rest = divmod(file.written, 10**9)
        sizes = struct.pack("<6Q", node, len(file.data), 0, 0, seconds, 0)
        return sizes + struct.pack("<10I", 0, rest, 0, file.mode, 1, file.uid, file.uid, 0, 4096, 0)

    def _attributes(self, node: int) -> bytes:
        return bytes(16) + self._plain(node)

    def _entry(self, node: int) -> bytes:
        return struct.pack("<QQ24x", node, 0) + self._plain(node)

    def _look_up(self, node: int, uid: int, words: bytes) -> bytes:
        found = self._names.get(words.rstrip(b"\0"))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return self._entry(found)

    def _create(self, node: int, uid: int, words: bytes) -> bytes:
        _, mode, umask, _ = struct.unpack_from("<4I", words)
        new = len(self._files) + 1
        self._files[new] = _File(stat.S_IFREG | (mode & ~umask & 0o7777), uid=uid)
        self._names[words[16:].rstrip(b"\0")] = new
        return self._entry(new) + bytes(16)

    def _make_folder(self, node: int, uid: int, words: bytes) -> bytes:
        new = len(self._files) + 1
        self._files[new] = _File(stat.S_IFDIR | 0o777, uid=uid)
        self._names[words[8:].rstrip(b"\0")] = new
        return self._entry(new)

    def _set(self, node: int, uid: int, words: bytes) -> bytes:
        valid, size = struct.unpack_from("<I12xQ", words)
        if valid & 8:
            data = self._files[node].data
            data[size:] = bytes(max(0, size - len(data)))
            self._files[node].written = time.time_ns()
        return self._attributes(node)

    def _read(self, node: int, uid: int, words: bytes) -> bytes:
        offset, size = struct.unpack_from("<8xQI", words)
        return bytes(self._files[node].data[offset : offset + size])

    def _write(self, node: int, uid: int, words: bytes) -> bytes:
        offset, size = struct.unpack_from("<8xQI", words)
        data = self._files[node].data
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + size] = words[40 : 40 + size]
        self._files[node].written = time.time_ns()
        return struct.pack("<I4x", size)


if __name__ == "__main__":
    _Server(int(sys.argv[1])).serve()
