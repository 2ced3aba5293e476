"""Send an image to the program that asks for it (docs/design/protocols.md, Export).

Every chunk is read and hashed before the first byte is sent: against the store's digests, so that
what is damaged is never passed on, and with SHA-256, by which it is named elsewhere. It is read
again to be sent, if the program wants it, and compared with that name.
"""

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from phosd.engine.criu.images.build_ids import noted
from phosd.engine.digest import DigestKey, digest_buffer
from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import CHUNK, ChunkRef, FileDigest, Manifest
from phosd.engine.image.packs import HEADER, RECORD, read_record
from phosd.engine.image.portable import PortableFile, PortableImage, portable
from phosd.engine.image.private_files import file_digest
from phosd.engine.image.sha256_hints import Sha256Hints
from phosd.engine.image.store import Image, Store
from phosd.engine.job.progress import Progress
from phosd.engine.operations.transfer.caller_stream import CallerStream
from phosd.errors import ImageCorrupt, Internal, Reason, Unsupported
from phosd.portable import ALIVE, DONE, MAX_MANIFEST, Chunk, Head, map_bytes, mapped
from phosd.units import human_bytes

_THREADS = min(16, os.cpu_count() or 1)
_AHEAD = 2 * _THREADS
"""Chunks that are read before they can be sent."""

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def export_image(store: Store, image_id: str, stream: CallerStream, progress: Progress) -> None:
    """Send an image: its manifest, and then the chunks that the other side wants.

    Raises :class:`ImageCorrupt`, :class:`NoSuchImage`, and what :class:`CallerStream` raises.
    """
    with store.open(image_id) as image:
        source = _Source(store.key, image)
        found = source.hashed(progress)
        Sha256Hints(store, image.manifest.owner).add(source.names)
        head = Head(found.packed)
        if len(head.manifest) > MAX_MANIFEST:
            raise Unsupported(
                f"the manifest of image {image_id} would take {human_bytes(len(head.manifest))} "
                f"elsewhere, more than the {human_bytes(MAX_MANIFEST)} that are read there",
                hint="the program has too many blocks, files or processes",
                reason=Reason.TOO_LARGE,
            )
        progress.phase("offer")
        stream.send(head.packed)
        count = len(found.chunks)
        wanted = [*mapped(stream.receive(map_bytes(count)), count)]
        progress.phase("send", bytes_total=sum(found.chunks[number].length for number in wanted))
        for data in _ahead(source.read, wanted):
            stream.send(data)
            progress.advance(len(data))
        progress.phase("store")
        while (said := stream.receive(1)) == ALIVE:
            progress.check()
        if said != DONE:
            raise Internal(
                f"the program that asked for the transfer says {said!r}",
                hint="it is of another version; start it again",
            )
        progress.finish()


@dataclass(frozen=True)
class _Piece:
    """A part of a CRIU file."""

    folder: str
    path: str
    offset: int
    length: int


class _Source:
    """The chunks of an open image, by the numbers that they have in its manifest for elsewhere."""

    def __init__(self, key: DigestKey, image: Image) -> None:
        self._key = key
        self._image = image
        self._chunks: list[Chunk] = []
        self._places: list[_Piece | ChunkRef] = []
        self._numbers: dict[str, int] = {}
        self.names: dict[str, str] = {}
        """The store's digest of each chunk of device memory, by its SHA-256."""

    def hashed(self, progress: Progress) -> PortableImage:
        """Read all of it, and return its manifest for elsewhere."""
        manifest = self._image.manifest
        stored = {(ref.pack, ref.offset): ref for block in manifest.blocks for ref in block.chunks}
        files = [(tree.folder, file) for tree in manifest.trees for file in tree.files]
        size = sum(ref.length for ref in stored.values()) + sum(file.size for _, file in files)
        progress.phase("hash", bytes_total=size)
        portable_files: list[PortableFile] = []
        for (_, file), pieces in zip(files, _ahead(self._pieces, files), strict=True):
            numbers = tuple(self._number(piece, sha256) for piece, sha256 in pieces)
            portable_files.append(PortableFile(file.path, file.size, numbers))
            progress.advance(file.size)
            progress.check()
        of_place: dict[tuple[int, int], int] = {}
        for (place, ref), sha256 in zip(
            stored.items(), _ahead(self._hash_chunk, stored.values()), strict=True
        ):
            of_place[place] = self._number(ref, sha256)
            self.names[sha256] = ref.digest
            progress.advance(ref.length)
            progress.check()
        left = iter(portable_files)
        return portable(
            _with_build_ids(manifest, Path(f"/proc/self/fd/{self._image.folder}")),
            self._chunks,
            [[next(left) for _ in tree.files] for tree in manifest.trees],
            [[of_place[ref.pack, ref.offset] for ref in block.chunks] for block in manifest.blocks],
        )

    def read(self, number: int) -> bytes:
        """Return the bytes of a chunk, which must be those that were hashed."""
        place, chunk = self._places[number], self._chunks[number]
        if isinstance(place, _Piece):
            with os.fdopen(
                self._image.open_file(place.folder, place.path, lent=True), "rb"
            ) as file:
                data = os.pread(file.fileno(), place.length, place.offset)
        else:
            buffer = mmap.mmap(-1, RECORD)
            read_record(self._image.packs[place.pack], place.offset, buffer, f"pack {place.pack}")
            data = buffer[HEADER : HEADER + place.length]
        if point(Point.EXPORT_READ):
            data = data[:-1]
        if hashlib.sha256(data).hexdigest() != chunk.sha256:
            raise self._damaged(f"{place}")
        return data

    def _number(self, place: "_Piece | ChunkRef", sha256: str) -> int:
        """Return the number of the chunk with this hash, a new one if there was none."""
        number = self._numbers.setdefault(sha256, len(self._chunks))
        if number == len(self._chunks):
            self._chunks.append(Chunk(sha256, place.length))
            self._places.append(place)
        return number

    def _pieces(self, of: tuple[str, FileDigest]) -> list[tuple[_Piece, str]]:
        """Return the parts of a CRIU file with their hashes, after it was compared with its
        own.
        """
        folder, expected = of
        found = []
        with os.fdopen(self._image.open_file(folder, expected.path, lent=True), "rb") as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            if size != expected.size or file_digest(descriptor) != expected.sha256:
                raise self._damaged(f"the file {folder}/{expected.path}")
            for offset in range(0, size, CHUNK):
                data = os.pread(descriptor, CHUNK, offset)
                piece = _Piece(folder, expected.path, offset, len(data))
                found.append((piece, hashlib.sha256(data).hexdigest()))
        return found

    def _hash_chunk(self, ref: ChunkRef) -> str:
        buffer = mmap.mmap(-1, RECORD)
        where = f"pack {ref.pack} (image {self._image.manifest.id})"
        record = read_record(self._image.packs[ref.pack], ref.offset, buffer, where)
        view = memoryview(buffer)[HEADER : HEADER + ref.length]
        digest = digest_buffer(self._key, view)[0].hex()
        if (record.digest.hex(), record.length, digest) != (ref.digest, ref.length, ref.digest):
            raise self._damaged(f"the record at {ref.offset} of {where}")
        return hashlib.sha256(view).hexdigest()

    def _damaged(self, what: str) -> ImageCorrupt:
        return ImageCorrupt(
            f"{what} of image {self._image.manifest.id} is not what was saved",
            hint="the image can neither be restored nor passed on; delete it and check the disk",
        )


def _with_build_ids(manifest: Manifest, folder: Path) -> Manifest:
    """Return the manifest with the build-ids that CRIU's files in ``folder`` have."""
    replace = msgspec.structs.replace
    trees = []
    for tree in manifest.trees:
        details = tree.details
        if details is not None:
            ids = noted(folder / tree.folder)
            mapped = (
                replace(file, build_id=ids.get(file.path, "")) for file in details.mapped_files
            )
            details = replace(details, mapped_files=tuple(mapped))
        trees.append(replace(tree, details=details))
    return replace(manifest, trees=tuple(trees))


def _ahead(work: Callable[[_Item], _Found], items: "Iterable[_Item]") -> Iterator[_Found]:
    """Yield what ``work`` makes of each item, in order; some are worked on in advance."""
    with ThreadPoolExecutor(_THREADS) as pool:
        begun: deque[Future[_Found]] = deque()
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > _AHEAD:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
