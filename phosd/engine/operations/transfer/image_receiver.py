"""Receive the chunks of an image, and write each to where it belongs."""

import hashlib
import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phosd.engine.digest import digest_buffer
from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.image.packs import (
    CAPACITY,
    HEADER,
    RECORD,
    header_fields,
    read_record,
    record_size,
)
from phosd.engine.image.portable import PortableImage
from phosd.engine.image.store import ImageWriter, Store
from phosd.engine.image.writer import Pack
from phosd.engine.job.progress import Progress
from phosd.engine.operations.transfer.caller_stream import CallerStream
from phosd.errors import ImageCorrupt, PhosError
from phosd.portable import Chunk

_THREADS = min(8, os.cpu_count() or 1)
_AHEAD = 2 * _THREADS
"""Chunks that have come and are not written yet."""
_RESERVED_AT_ONCE = 1 << 30
"""Bytes that have come between two looks at the quota."""


class ImageReceiver:
    """Receives the chunks of an image in order, and writes each to where it belongs."""

    def __init__(
        self,
        store: Store,
        found: PortableImage,
        writer: ImageWriter,
        stream: CallerStream,
        progress: Progress,
    ) -> None:
        self._store = store
        self._key = store.key
        self._found = found
        self._writer = writer
        self._stream = stream
        self._progress = progress
        self._packs: list[Pack] = []
        self._end = 0
        self._arrived = self._reserved = 0
        self._lock = threading.Lock()
        self._parts: defaultdict[int, list[tuple[Path, int]]] = defaultdict(list)
        self._in_memory = found.in_memory
        self._places: dict[int, ChunkRef] = {}
        self._not_as_known: set[ChunkRef] = set()
        self._what = f"image {writer.id}"
        with private_files.space_errors(self._what):
            self._make_files()

    @property
    def wanted(self) -> frozenset[int]:
        """The numbers of the chunks that are not here."""
        return frozenset(range(len(self._found.chunks))) - self._places.keys()

    def take_what_is_here(self, hints: Mapping[str, str]) -> None:
        """Take chunks that other images of the owner have. ``hints`` are digests by SHA-256: each
        chunk is read and compared.
        """
        numbers = [n for n in self._in_memory if self._found.chunks[n].sha256 in hints]
        with private_files.space_errors(self._what), ThreadPoolExecutor(_THREADS) as pool:
            for number, ref in zip(
                numbers, pool.map(lambda n: self._here(n, hints), numbers), strict=True
            ):
                self._progress.check()
                if ref is not None:
                    self._places[number] = ref

    def _here(self, number: int, hints: Mapping[str, str]) -> ChunkRef | None:
        chunk = self._found.chunks[number]
        ref = self._writer.find(hints[chunk.sha256])
        if ref is None or ref.length != chunk.length:
            return None
        buffer = mmap.mmap(-1, RECORD)
        try:
            pack = private_files.open_private(self._store.pack_path(ref.pack), os.O_RDONLY)
            with os.fdopen(pack, "rb"):
                read_record(pack, ref.offset, buffer, f"pack {ref.pack}")
        except (OSError, PhosError):
            self._not_as_known.add(ref)
            return None  # it comes from elsewhere then; verifying its image finds the damage
        with memoryview(buffer) as whole, whole[HEADER : HEADER + chunk.length] as content:
            if hashlib.sha256(content).hexdigest() != chunk.sha256:
                self._not_as_known.add(ref)
                return None
            for path, offset in self._parts.get(number, ()):
                self._write_part(path, offset, content)
        return ref

    def receive(self) -> dict[int, ChunkRef]:
        """Receive and write what is wanted. Returns the place of each chunk of device memory."""
        what, places, in_memory = self._what, self._places, self._in_memory
        wanted = sorted(self.wanted)
        new = len(in_memory - places.keys())
        self._packs = self._writer.packs(new) if new else []
        begun: deque[Future[tuple[int, ChunkRef | None]]] = deque()

        def take_first() -> None:
            number, ref = begun.popleft().result()
            if ref is not None:
                places[number] = ref
                self._writer.add([ref])
            self._progress.advance(self._found.chunks[number].length)
            self._reserve(self._found.chunks[number].length)

        with private_files.space_errors(what), ThreadPoolExecutor(_THREADS) as pool:
            try:
                for number in wanted:
                    chunk = self._found.chunks[number]
                    buffer = mmap.mmap(-1, RECORD)
                    with memoryview(buffer) as view:
                        self._stream.receive_into(view[HEADER : HEADER + chunk.length])
                    if point(Point.IMPORT_RECEIVE):
                        buffer[HEADER] ^= 1
                    stored = number in in_memory
                    begun.append(pool.submit(self._write, number, chunk, buffer, stored))
                    if len(begun) > _AHEAD:
                        take_first()
                while begun:
                    take_first()
            finally:
                pool.shutdown(cancel_futures=True)
        return places

    def _reserve(self, size: int) -> None:
        """Count bytes towards the quota, every now and then: the store's images are looked at."""
        self._arrived += size
        if self._arrived >= self._reserved + _RESERVED_AT_ONCE:
            self._reserved = self._arrived
            self._writer.reserve(self._arrived)

    def _make_files(self) -> None:
        """Make CRIU's files, full of zeros, and note which parts of them each chunk is."""
        for folder, file in self._found.named():
            path = self._writer.folder / folder / file.path
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
            try:
                os.ftruncate(descriptor, file.size)
            finally:
                os.close(descriptor)
            for index, number in enumerate(file.chunks):
                self._parts[number].append((path, index * CHUNK))

    def _next_place(self, length: int) -> tuple[Pack, int]:
        """Return the place for the next chunk of device memory."""
        with self._lock:
            if self._end + record_size(length) > CAPACITY:
                self._packs.pop(0)
                self._end = 0
            offset, self._end = self._end, self._end + record_size(length)
            return self._packs[0], offset

    def _write(
        self, number: int, chunk: Chunk, buffer: mmap.mmap, stored: bool
    ) -> tuple[int, ChunkRef | None]:
        """Write a chunk to the files that it is part of, and if it is to be ``stored`` as device
        memory to a pack, unless another image of the owner has it.
        """
        with memoryview(buffer) as whole, whole[HEADER : HEADER + chunk.length] as content:
            if hashlib.sha256(content).hexdigest() != chunk.sha256:
                raise ImageCorrupt(
                    f"chunk {number} of the image has come with other bytes than it was sent with",
                    hint="import it again; if that says the same, export it again",
                )
            for path, offset in self._parts.get(number, ()):
                self._write_part(path, offset, content)
            if not stored:
                return number, None
            digest = digest_buffer(self._key, content)[0]
            known = self._writer.find(digest.hex())
            if known is not None and known not in self._not_as_known:
                return number, known
            pack, offset = self._next_place(chunk.length)
            fields = header_fields(self._writer.id, self._writer.owner, digest, chunk.length)
            whole[: len(fields)] = fields
            _write_all(pack.fd, whole[: record_size(chunk.length)], offset)
        return number, ChunkRef(digest.hex(), pack.number, offset, chunk.length)

    def _write_part(self, path: Path, offset: int, content: memoryview) -> None:
        if not bytes(content).strip(b"\0"):  # it stays a hole
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            _write_all(descriptor, content, offset)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: Any, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
