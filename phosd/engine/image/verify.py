"""Verify an image: read every byte of it again and compare digests."""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from phosd.engine.digest import DigestKey, digest_buffer
from phosd.engine.image.manifest import Block, ChunkRef, FileDigest
from phosd.engine.image.packs import HEADER, RECORD, read_record
from phosd.engine.image.private_files import file_digest
from phosd.engine.image.store import Image, Store
from phosd.engine.job.progress import Progress
from phosd.errors import ImageCorrupt

_THREADS = min(16, os.cpu_count() or 1)
_BATCH = 16
_T = TypeVar("_T")


def verify(store: Store, image_id: str, progress: Progress) -> None:
    """Check every chunk and every file of an image against its manifest.

    Raises :class:`ImageCorrupt` naming the chunk (block, offset, pack, record) or the file at the
    first difference, :class:`NoSuchImage`, or :class:`Cancelled`.
    """
    with store.open(image_id) as image:
        chunks = _stored_chunks(image)
        folders = [(tree.folder, file) for tree in image.manifest.trees for file in tree.files]
        total = sum(c.length for c, _ in chunks) + sum(file.size for _, file in folders)
        progress.phase("verify", bytes_total=total)
        verify_chunks(store, image, progress)
        _all(lambda f: _check_file(image, *f), folders, progress)
        progress.finish()


def verify_chunks(store: Store, image: Image, progress: Progress) -> None:
    """Check every chunk of an open image, as :func:`verify` does, in the current phase."""
    chunks = _stored_chunks(image)
    batches = [chunks[i : i + _BATCH] for i in range(0, len(chunks), _BATCH)]
    _all(lambda batch: _check_chunks(store, image, batch), batches, progress)


def _all(check: Callable[[_T], int], things: Sequence[_T], progress: Progress) -> None:
    """Call ``check``, which returns how many bytes it has read, for all things."""
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for done in pool.map(check, things):
                progress.advance(done)
                progress.check()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _stored_chunks(image: Image) -> list[tuple[ChunkRef, str]]:
    """Return each stored chunk once, ordered by pack, with the name of its first use."""
    found: dict[tuple[int, int, str], tuple[ChunkRef, str]] = {}
    for block in image.manifest.blocks:
        for offset, chunk in _placed(block):
            name = f"chunk at {offset:#x} of block {block.va:#x}"
            found.setdefault((chunk.pack, chunk.offset, chunk.digest), (chunk, name))
    return [found[key] for key in sorted(found)]


def _placed(block: Block) -> Iterator[tuple[int, ChunkRef]]:
    offset = 0
    for chunk in block.chunks:
        yield offset, chunk
        offset += chunk.length


def _check_chunks(store: Store, image: Image, chunks: Sequence[tuple[ChunkRef, str]]) -> int:
    buffer = mmap.mmap(-1, RECORD)
    for chunk, name in chunks:
        try:
            _check_chunk(store.key, image, chunk, name, buffer)
        except ImageCorrupt:
            store.distrust(chunk.pack)
            raise
    return sum(chunk.length for chunk, _ in chunks)


def _check_chunk(
    key: DigestKey, image: Image, chunk: ChunkRef, name: str, buffer: mmap.mmap
) -> None:
    where = f"pack {chunk.pack} (image {image.manifest.id}, {name})"
    record = read_record(image.packs[chunk.pack], chunk.offset, buffer, where)
    matches = (
        record.digest.hex() == chunk.digest
        and record.length == chunk.length
        and record.owner == image.manifest.owner
    )
    view = memoryview(buffer)[HEADER : HEADER + chunk.length]
    actual = digest_buffer(key, view)[0].hex()
    if not matches or actual != chunk.digest:
        raise ImageCorrupt(
            f"the record at {chunk.offset} of {where} holds other bytes than were saved",
            hint="the image cannot be restored; delete it and check the disk",
        )


def _check_file(image: Image, folder: str, expected: FileDigest) -> int:
    with os.fdopen(image.open_file(folder, expected.path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        same = size == expected.size
        if not same or file_digest(file.fileno()) != expected.sha256:
            raise ImageCorrupt(
                f"the file {folder}/{expected.path} of image {image.manifest.id} is not what was"
                f" saved ({size} bytes, recorded {expected.size})",
                hint="the image cannot be restored; delete it and check the disk",
            )
    return expected.size
