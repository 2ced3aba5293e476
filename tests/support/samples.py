"""Make images like those of a checkpoint, but without a GPU."""

import os
from collections.abc import Sequence
from pathlib import Path

from phosd.engine.digest import digest_buffer
from phosd.engine.image.mac import sealed
from phosd.engine.image.manifest import (
    CHUNK,
    Block,
    ChunkRef,
    Gpu,
    Host,
    Manifest,
    Process,
    Tree,
)
from phosd.engine.image.packs import HEADER, header_fields, record_size
from phosd.engine.image.store import ImageWriter, Store
from phosd.engine.image.tier import ExpectedSize
from phosd.engine.image.writer import Pack

GPU = Gpu(0, "GPU-00000000-0000-4000-8000-000000000000", "PHOS software GPU", 1 << 31)
HOST = Host("boot", "6.18", "4.2.1", 13000, ())
CRIU_FILES = {"core-7.img": b"registers" * 100, "sub/pages-1.img": bytes(9000)}


def append(store: Store, writer: ImageWriter, pack: Pack, chunk: bytes) -> ChunkRef:
    """Write one record at the end of a pack."""
    digest = digest_buffer(store.key, chunk)[0]
    offset = os.fstat(pack.fd).st_size
    record = header_fields(writer.id, writer.owner, digest, len(chunk)).ljust(HEADER, b"\0") + chunk
    os.pwrite(pack.fd, record.ljust(record_size(len(chunk)), b"\0"), offset)
    return ChunkRef(digest.hex(), pack.number, offset, len(chunk))


def manifest_of(writer: ImageWriter, blocks: Sequence[Block], trees: Sequence[Tree]) -> Manifest:
    """Return a manifest with one process that holds ``blocks``."""
    process = Process(7, 0, 1, "/bin/x", ("x",), 0, 0, (), (7,), True, True, True)
    return Manifest(
        id=writer.id,
        created="2026-11-20T15:30:12.000Z",
        mode="stop",
        owner=writer.owner,
        host=HOST,
        gpus=(GPU,),
        trees=tuple(trees),
        processes=(process,),
        blocks=tuple(blocks),
        stop_seconds=0.5,
    )


def fill(store: Store, writer: ImageWriter, content: bytes) -> Manifest:
    """Write ``content`` as one block and some CRIU files; return the manifest to publish."""
    parts = [content[i : i + CHUNK] for i in range(0, len(content), CHUNK)]
    (pack,) = writer.packs(len(parts))
    os.ftruncate(pack.fd, 0)  # it may be a preallocated one
    chunks = tuple(append(store, writer, pack, part) for part in parts)
    for name, data in CRIU_FILES.items():
        path = writer.folder / "criu-0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    tree = Tree(7, "criu-0", writer.seal("criu-0"))
    return manifest_of(writer, [Block(0, 1, 0x7F0000000000, len(content), 0, chunks)], [tree])


def publish(store: Store, content: bytes, owner: int = 0, size: int = 0) -> Manifest:
    """Publish a complete image with one block of ``content``; in memory if there ``size`` bytes are
    free.
    """
    expected = ExpectedSize(0, size) if size else None
    with store.begin(owner, size=expected) as writer:
        manifest = fill(store, writer, content)
        writer.publish(manifest)
    return manifest


def rewrite(store: Store, image_id: str, text: bytes) -> None:
    """Replace the JSON of a manifest, and seal it correctly."""
    path = store.disk.images / image_id / "manifest.json"
    path.write_bytes(sealed(store.key.packed, text))


def everything(state: Path) -> set[str]:
    """Return every file below the images and packs of a store."""
    return {
        str(path.relative_to(state))
        for folder in ("images", "packs")
        for path in (state / folder).rglob("*")
    }
