"""Rewrite packs that are less than half needed, without the unneeded chunks.

No chunk is ever missing: the new pack is on the disk before a manifest names it, each manifest is
replaced by a rename, and the old pack is removed when no manifest names it. A crash between two
steps leaves both packs complete, and :meth:`Store.sweep` removes the unneeded one.
"""

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from phosd.engine.digest import digest_buffer
from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.image.complete import require_complete
from phosd.engine.image.mac import sealed
from phosd.engine.image.manifest import Block, ChunkRef, Manifest
from phosd.engine.image.packs import HEADER, RECORD, read_record, record_size
from phosd.engine.image.tier import MANIFEST
from phosd.engine.image.usage import pack_bytes
from phosd.errors import ImageCorrupt

if TYPE_CHECKING:
    from phosd.engine.image.store import Store

_Place = tuple[int, int]
"""Pack number and offset of a record."""


@dataclass(frozen=True)
class _Wasteful:
    """A pack to rewrite: its size in bytes, the needed chunks, and the images that need them."""

    number: int
    size: int
    chunks: Mapping[int, ChunkRef]
    images: Sequence[Manifest]


def compact(store: "Store", go_on: Callable[[], bool]) -> int:
    """Rewrite packs that are less than half needed. Returns the number of bytes freed.

    The store is locked for one pack at a time; ``go_on`` is called before each. Packs that a job
    reads or writes, or that an unfinished image may name, are skipped. Nothing is rewritten while a
    manifest is damaged, since it is unknown which chunks that image needs.
    """
    freed = 0
    left_alone: set[int] = set()
    while go_on():
        with store.locked():
            wasteful = _find(store, left_alone)
            if wasteful is None:
                break
            left_alone.add(wasteful.number)
            freed += _rewrite(store, wasteful)
    return freed


def _find(store: "Store", left_alone: set[int]) -> _Wasteful | None:
    if store.damaged():
        return None
    users: dict[int, list[Manifest]] = {}
    for image in store.list():
        for pack in pack_bytes(image):
            users.setdefault(pack, []).append(image)
    memory = store.memory
    pinned = store.pinned_packs()
    for number, images in sorted(users.items()):
        path = store.pack_path(number)
        # An image in memory says the same as its copy on the disk, as long as it is there.
        in_memory = memory is not None and any(memory.has(image.id) for image in images)
        if number in left_alone | pinned or in_memory or not private_files.unused(path):
            continue
        size = path.stat().st_size
        if 2 * max(pack_bytes(image)[number] for image in images) >= size:
            continue
        blocks = (block for image in images for block in image.blocks)
        needed = {c.offset: c for block in blocks for c in block.chunks if c.pack == number}
        if 2 * sum(record_size(chunk.length) for chunk in needed.values()) < size:
            return _Wasteful(number, size, needed, images)
    return None


def _rewrite(store: "Store", wasteful: _Wasteful) -> int:
    """Rewrite one pack. Returns the bytes that this frees; 0 if the pack is in use or damaged."""
    with ExitStack() as held:
        for image in wasteful.images:
            folder = private_files.open_private(store.disk.images / image.id, os.O_DIRECTORY)
            held.callback(private_files.close_locked, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
        point(Point.COMPACT_CREATE)
        (number,) = store.new_pack_numbers(1)
        try:
            moved = _copy(store, wasteful, number)
        except BaseException as error:
            store.disk.pack_path(number).unlink(missing_ok=True)
            if isinstance(error, ImageCorrupt):
                store.distrust(wasteful.number)
                return 0  # verifying an image finds the damage and names the image
            raise
        for image in wasteful.images:
            _replace(store, image, moved)
        store.require_unneeded({wasteful.number})
        point(Point.COMPACT_DELETE)
        store.pack_path(wasteful.number).unlink()
        private_files.sync_folder(store.disk.packs)
        return wasteful.size - store.pack_path(number).stat().st_size


def _copy(store: "Store", wasteful: _Wasteful, number: int) -> dict[_Place, ChunkRef]:
    """Copy the needed chunks into a new pack, hashing each. Returns their new places by old place.

    Raises :class:`ImageCorrupt` if a chunk does not have its digest.
    """
    moved: dict[_Place, ChunkRef] = {}
    path = store.disk.pack_path(number)
    buffer = bytearray(RECORD)
    at = 0
    with ExitStack() as opened:
        source = private_files.open_private(store.pack_path(wasteful.number), os.O_RDONLY)
        opened.callback(os.close, source)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        target = os.open(path, flags, 0o600)
        opened.callback(os.close, target)
        with private_files.space_errors(str(path)):
            for offset, chunk in sorted(wasteful.chunks.items()):
                record = read_record(source, offset, buffer, f"pack {wasteful.number}")
                content = memoryview(buffer)[HEADER : HEADER + record.length]
                if digest_buffer(store.key, content)[0].hex() != chunk.digest:
                    raise ImageCorrupt(f"a chunk of pack {wasteful.number} is damaged")
                size = record_size(record.length)
                os.pwrite(target, memoryview(buffer)[:size], at)
                moved[wasteful.number, offset] = msgspec.structs.replace(
                    chunk, pack=number, offset=at
                )
                at += size
            point(Point.COMPACT_SYNC)
            os.fsync(target)
    private_files.sync_folder(store.disk.packs)
    return moved


def _replace(store: "Store", image: Manifest, moved: Mapping[_Place, ChunkRef]) -> None:
    """Replace the manifest by one with the new places."""

    def renewed(block: Block) -> Block:
        chunks = tuple(moved.get((c.pack, c.offset), c) for c in block.chunks)
        return msgspec.structs.replace(block, chunks=chunks)

    folder = store.disk.images / image.id
    manifest = msgspec.structs.replace(image, blocks=tuple(map(renewed, image.blocks)))
    partial = folder / "manifest.partial"
    partial.unlink(missing_ok=True)
    with private_files.space_errors(str(partial)):
        point(Point.COMPACT_MANIFEST_WRITE)
        private_files.write_durably(
            partial, sealed(store.key.packed, msgspec.json.encode(manifest))
        )
    require_complete(manifest, folder, store.disk.pack_path)
    point(Point.COMPACT_MANIFEST_RENAME)
    partial.rename(folder / MANIFEST)
    point(Point.COMPACT_MANIFEST_SYNC)
    private_files.sync_folder(folder)
