"""Bring the device memory of an image into another store."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from phosd.engine.image import private_files
from phosd.engine.image.manifest import Block, ChunkRef, Manifest
from phosd.engine.image.reader import Image
from phosd.engine.image.usage import pack_ends
from phosd.engine.image.writer import ImageWriter

_PIECE = 16 << 20


def bring(
    image: Image, writer: ImageWriter, copied: Callable[[int], None], *, link: bool = False
) -> tuple[Block, ...]:
    """Bring the chunks of an open image to an unfinished one, and return its blocks with their
    places there. Chunks that the owner has there already are named once more.

    ``link``: the image is another store's of ours: packs on the same file system get a name there,
    which takes no bytes. It stays open until the new image is published. ``copied`` is told of
    bytes, and may raise to end it. Raises :class:`~phosd.errors.OutOfSpace`.
    """
    lacking = sorted({ref.pack for ref in _lacking(image.manifest, writer)})
    numbers = (_linked(image, writer, lacking) if link else None) or _copied(
        image, writer, lacking, copied
    )
    return tuple(_there(block, numbers, writer) for block in image.manifest.blocks)


def lacking_bytes(manifest: Manifest, writer: ImageWriter) -> int:
    """Return the bytes of the image's chunks that its owner does not have there already."""
    return sum({ref.digest: ref.length for ref in _lacking(manifest, writer)}.values())


def _lacking(manifest: Manifest, writer: ImageWriter) -> Iterator[ChunkRef]:
    refs = (ref for block in manifest.blocks for ref in block.chunks)
    return (ref for ref in refs if writer.find(ref.digest) is None)


def _linked(image: Image, writer: ImageWriter, packs: Sequence[int]) -> Mapping[int, int] | None:
    """Return the numbers of packs that got another name; None on another file system."""
    try:
        made = writer.link([image.packs[number] for number in packs])
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return None
    return dict(zip(packs, made, strict=True))


def _copied(
    image: Image, writer: ImageWriter, packs: Sequence[int], copied: Callable[[int], None]
) -> Mapping[int, int]:
    ends = pack_ends([image.manifest])
    numbers = {}
    with private_files.space_errors(f"the packs of image {writer.id}"):
        for number in packs:
            (pack,) = writer.packs(1)
            copy(image.packs[number], pack.fd, ends[number], copied)
            numbers[number] = pack.number
    return numbers


def _there(block: Block, numbers: Mapping[int, int], writer: ImageWriter) -> Block:
    def place(ref: ChunkRef) -> ChunkRef:
        if ref.pack in numbers:
            return msgspec.structs.replace(ref, pack=numbers[ref.pack])
        found = writer.find(ref.digest)
        assert found is not None  # the pack is not lacking
        return found

    return msgspec.structs.replace(block, chunks=tuple(map(place, block.chunks)))


def copy(source: int, target: int, size: int, copied: Callable[[int], None]) -> None:
    """Copy so many bytes from the start of one open file to another; ``copied`` is told of them."""
    done = 0
    while done < size:
        count = os.sendfile(target, source, done, min(_PIECE, size - done))
        if not count:
            break  # what is missing is found when it is read
        done += count
        copied(count)
