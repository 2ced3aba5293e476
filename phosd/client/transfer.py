"""Exchange the bytes of images with phosd (docs/reference/portable-format.md).

phosd opens no file and no address for a user. A program that exports or imports an image listens at
an abstract socket, names it in its call, and does itself, with its own rights, what is to be done
with the bytes.
"""

import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from phosd import unix_sockets
from phosd.errors import ImageCorrupt, Internal, NotAuthorized, PhosError
from phosd.portable import (
    DONE,
    FOREIGN,
    MAGIC,
    SIGNED_FOR,
    Chunk,
    Head,
    map_bytes,
    mapped,
    packed_map,
    read_head,
)

_LOOK_SECONDS = 0.2
_ROOT = 0
_T = TypeVar("_T")


class PhosdHasLeft(Exception):
    """phosd has closed the connection: its job tells why."""


class Link:
    """The connection to phosd. Raises :class:`PhosdHasLeft`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                got = unix_sockets.receive_into(self._socket, view)
            except OSError as error:
                raise PhosdHasLeft from error
            if not got:
                raise PhosdHasLeft
            view = view[got:]
        return bytes(data)

    def write(self, data: bytes) -> None:
        """Send all of it."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise PhosdHasLeft from error

    def wait_for_end(self) -> None:
        """Wait until phosd has closed it."""
        try:
            while unix_sockets.receive(self._socket, 1 << 16):
                pass
        except OSError:
            return


class Transfer(Generic[_T]):
    """What a thread does with the bytes, while a call to phosd is made inside the context.

    ``name`` is that of the socket, for the call. ``work`` gets the link to phosd, once that has
    connected; :meth:`result` waits until it is done.
    """

    def __init__(self, work: Callable[[Link], _T]) -> None:
        self._work = work
        self.name = f"phos-transfer-{secrets.token_hex(16)}"
        self._listening = unix_sockets.listening(self.name)
        self._connection: socket.socket | None = None
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._result: list[_T] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="transfer")

    def __enter__(self) -> Self:
        self._listening.settimeout(_LOOK_SECONDS)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._connection is not None:
            unix_sockets.close(self._connection)
        unix_sockets.stop_listening(self._listening)

    @property
    def failure(self) -> Exception | None:
        """What has gone wrong here, and not at phosd, so far."""
        return None if isinstance(self._failure, PhosdHasLeft) else self._failure

    def result(self) -> _T:
        """Wait until the work is done, and return its result. Raises what went wrong."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        (result,) = self._result
        return result

    def _run(self) -> None:
        try:
            connection = self._accept()
            if connection is None:
                return
            self._connection = connection
            try:
                self._result.append(self._work(Link(connection)))
            finally:
                unix_sockets.close(connection)  # phosd's job ends with it
        except Exception as error:
            self._failure = error

    def _accept(self) -> socket.socket | None:
        """Return the connection of phosd; anybody may connect, and the others are told nothing."""
        while not self._over.is_set():
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:  # the call is over
                return None
            connection.settimeout(None)
            if unix_sockets.peer_of(connection)[1] in (_ROOT, os.geteuid()):
                return connection
            unix_sockets.close(connection)
        return None


def received_head(link: Link, key: Path | None) -> Head:
    """Return the head that phosd sends, signed with the SSH key if there is one."""
    head = read_head(link.read)
    return head if key is None else Head(head.manifest, signature_of(head.manifest, key))


@dataclass(frozen=True)
class Sent:
    """What an image has of chunks and of bytes in them, and how many of these were sent."""

    chunks: int
    bytes: int
    sent_chunks: int
    sent_bytes: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], wanted: Sequence[int]) -> Self:
        size = sum(chunk.length for chunk in chunks)
        return cls(len(chunks), size, len(wanted), sum(chunks[n].length for n in wanted))


class Reader(Protocol):
    """A file to read from, unbuffered: one with a buffer cannot be closed while a thread waits for
    what it reads.
    """

    def read(self, size: int, /) -> bytes | None: ...


class Writer(Protocol):
    """A file to write to, unbuffered for the same reason."""

    def write(self, data: "bytes | memoryview", /) -> int | None: ...


def write_to(
    link: Link, file: Writer, key: Path | None = None, finish: Callable[[], None] | None = None
) -> Sent:
    """Write the image that phosd sends to a file, signed with a ``key``, and ``finish`` it: phosd's
    job ends then.
    """
    head = received_head(link, key)
    chunks = head.contents.chunks
    _write_all(file, head.packed)
    link.write(packed_map([True] * len(chunks)))
    for chunk in chunks:
        _write_all(file, link.read(chunk.length))
    if finish is not None:
        finish()
    link.write(DONE)
    return Sent.of(chunks, range(len(chunks)))


def _write_all(file: Writer, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def head_of(file: Reader, name: str) -> Head:
    """Read the head of an exported image. Raises :class:`ImageCorrupt` and what it is no image
    for.
    """
    first = file.read(1)
    if not first:
        raise ImageCorrupt(
            f"{name} is empty: no image has come", hint="see why it could not be exported"
        )
    if not MAGIC.startswith(first):
        raise ImageCorrupt(f"{name} is not the image of a phosd", hint=FOREIGN)
    left = [first]

    def read(count: int) -> bytes:
        before = left.pop() if left else b""
        return before + _exactly(file, count - len(before), name)

    return read_head(read, name)


def send_from(link: Link, head: Head, file: Reader, name: str) -> Sent:
    """Send the image to phosd of which ``head`` was read from ``file``. What is behind the last
    chunk that phosd wants may be missing: it has that from another image, and makes this one.
    """
    chunks = head.contents.chunks
    link.write(head.packed)
    wanted = frozenset(mapped(link.read(map_bytes(len(chunks))), len(chunks)))
    last = max(wanted, default=-1)
    for number, chunk in enumerate(chunks):
        try:
            data = _exactly(file, chunk.length, name)
        except ImageCorrupt:
            if number > last:
                break
            raise
        if number == last == len(chunks) - 1 and file.read(1):
            raise ImageCorrupt(
                f"{name} goes on behind the end of its image",
                hint="export the image again",
            )
        if number in wanted:
            link.write(data)
    link.wait_for_end()
    return Sent.of(chunks, sorted(wanted))


def send_head(link: Link, head: Head) -> None:
    """Send the beginning of an image, which is all that a dry run needs."""
    link.write(head.packed)
    link.wait_for_end()


def _exactly(file: Reader, count: int, name: str) -> bytes:
    parts: list[bytes] = []
    left = count
    while left:
        part = file.read(min(left, 1 << 20))
        if not part:
            raise ImageCorrupt(
                f"{name} ends in the middle of its image",
                hint="it was not copied as a whole; copy it again, or export the image again",
            )
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def signature_of(manifest: bytes, key: Path) -> bytes:
    """Return the signature by an SSH key: a private one, or a public one that ssh-agent has."""
    words: Sequence[str] = ("ssh-keygen", "-Y", "sign", "-f", str(key), "-n", SIGNED_FOR)
    try:
        done = subprocess.run(words, input=manifest, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise Internal(
            "the image cannot be signed: there is no ssh-keygen", hint="install openssh-client"
        ) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise NotAuthorized(
            f"the image cannot be signed with {key}: {said[-1] if said else 'for no known reason'}",
            hint="name a private key of yours, or a public one that ssh-agent has the private one "
            "of (`ssh-add -l`)",
        )
    return done.stdout


def as_error(failure: Exception, name: str) -> PhosError:
    """Return the error for what went wrong with a file."""
    if isinstance(failure, PhosError):
        return failure
    if isinstance(failure, OSError):
        return Internal(
            f"{name} cannot be used: {failure.strerror or failure}",
            hint="nothing of it was kept; mend that and try again",
        )
    raise failure
