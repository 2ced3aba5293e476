"""Compute what images need on the disk. Equal chunks count once, also for several images.

Sizes are in bytes, from the manifests. A pack holds chunks of one user's images only. It may be up
to twice as large, or larger until the next clean-up: precopy leaves chunks there that changed later
or that equal another one, and ``repack.py`` takes away what nothing needs.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import is_not

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.packs import record_size

_known: dict[str, tuple[weakref.ref[Manifest], Mapping[int, int]]] = {}
"""The result of :func:`pack_bytes` for each manifest that somebody still has."""
_MOST_TOTALS = 64
_totals: dict[tuple[object, ...], int] = {}


def pack_bytes(manifest: Manifest) -> Mapping[int, int]:
    """Return the bytes that an image has in each pack."""
    known = _known.get(manifest.id)
    if known is not None and known[0]() is manifest:
        return known[1]
    chunks = {(c.pack, c.offset): c.length for block in manifest.blocks for c in block.chunks}
    packs: Counter[int] = Counter()
    for (pack, _), length in chunks.items():
        packs[pack] += length
    _known[manifest.id] = weakref.ref(manifest, partial(_forget, manifest.id)), packs
    return packs


def _forget(image: str, gone: weakref.ref[Manifest]) -> None:
    """Forget a manifest that nobody has any more, unless another one of the image is known."""
    if (known := _known.get(image)) is not None and known[0] is gone:
        _known.pop(image, None)


def pack_ends(images: Iterable[Manifest]) -> Mapping[int, int]:
    """Return the end of the last record in each pack that one of the images needs."""
    ends: dict[int, int] = {}
    for image in images:
        for block in image.blocks:
            for chunk in block.chunks:
                end = chunk.offset + record_size(chunk.length)
                ends[chunk.pack] = max(ends.get(chunk.pack, 0), end)
    return ends


def file_bytes(manifest: Manifest) -> int:
    """Return the bytes of CRIU's files."""
    return sum(file.size for tree in manifest.trees for file in tree.files)


def total_bytes(images: Sequence[Manifest]) -> int:
    """Return the bytes that images take together: :attr:`Usage.total`, remembered for the images
    that were asked for last, as it takes time with those that share much.
    """
    # An image's chunks move to other packs only, and a pack never changes.
    key = tuple((image.id, file_bytes(image), *pack_bytes(image).items()) for image in images)
    total = _totals.get(key)
    if total is None:
        if len(_totals) >= _MOST_TOTALS:
            _totals.clear()
        total = _totals[key] = Usage(images).total
    return total


class SharedChunks:
    """Which chunks of images older ones have, too; remembered while the images stay the same."""

    def __init__(self) -> None:
        self._images: Sequence[Manifest] = ()
        self._found: Sequence[bytes] = ()

    def of(self, images: Sequence[Manifest]) -> Sequence[bytes]:
        """Return for each image, the oldest first, a byte for each chunk in the order of its
        blocks: 1 if an older image has it. For an image that has no pack in common with another one
        there are none.
        """
        known = self._images
        if len(known) != len(images) or any(map(is_not, known, images)):
            self._found = _shared_chunks(images)
            self._images = images
        return self._found


def _shared_chunks(images: Sequence[Manifest]) -> Sequence[bytes]:
    users = Counter(pack for image in images for pack in pack_bytes(image))
    common = {pack for pack, count in users.items() if count > 1}
    held: set[tuple[int, int]] = set()
    found = []
    for image in images:
        chunks = [chunk for block in image.blocks for chunk in block.chunks]
        if common.isdisjoint(pack_bytes(image)):
            found.append(b"")
            continue
        found.append(bytes((chunk.pack, chunk.offset) in held for chunk in chunks))
        held |= {(chunk.pack, chunk.offset) for chunk in chunks if chunk.pack in common}
    return found


class Usage:
    """The bytes that some images take together, with and without each of them.

    A chunk that several images share counts once. Only packs that several images share are looked
    at chunk by chunk.
    """

    def __init__(self, images: Iterable[Manifest]) -> None:
        self._images = {image.id: image for image in images}
        users = Counter(pack for image in self._images.values() for pack in pack_bytes(image))
        self._shared = {pack for pack, count in users.items() if count > 1}
        self._uses: Counter[tuple[int, int]] = Counter()
        self.total = 0
        for image in self._images.values():
            self.total += self._alone(image)
            for place, length in self._shared_chunks(image).items():
                self.total += 0 if self._uses[place] else length
                self._uses[place] += 1

    def remove(self, image: str) -> int:
        """Leave an image out. Returns by how many bytes that reduces the total."""
        gone = self._images.pop(image)
        freed = self._alone(gone)
        for place, length in self._shared_chunks(gone).items():
            self._uses[place] -= 1
            freed += 0 if self._uses[place] else length
        self.total -= freed
        return freed

    def _alone(self, image: Manifest) -> int:
        packs = pack_bytes(image).items()
        return file_bytes(image) + sum(size for pack, size in packs if pack not in self._shared)

    def _shared_chunks(self, image: Manifest) -> Mapping[tuple[int, int], int]:
        if self._shared.isdisjoint(pack_bytes(image)):
            return {}
        chunks = (chunk for block in image.blocks for chunk in block.chunks)
        return {(c.pack, c.offset): c.length for c in chunks if c.pack in self._shared}
