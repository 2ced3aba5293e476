"""Compute what images need on the disk. Equal chunks count once, also for several images.

Sizes are in bytes, from the manifests. A pack holds chunks of one user's images only. It may be up
to twice as large, or larger until the next clean-up: precopy leaves chunks there that changed later
or that equal another one, and ``repack.py`` takes away what nothing needs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.packs import record_size

_MOST_KNOWN = 4096
_known: dict[str, tuple[Manifest, Mapping[int, int]]] = {}


def pack_bytes(manifest: Manifest) -> Mapping[int, int]:
    """Return the bytes that an image has in each pack."""
    known = _known.get(manifest.id)
    if known is not None and known[0] is manifest:
        return known[1]
    chunks = {(c.pack, c.offset): c.length for block in manifest.blocks for c in block.chunks}
    packs: Counter[int] = Counter()
    for (pack, _), length in chunks.items():
        packs[pack] += length
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[manifest.id] = manifest, packs
    return packs


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


class Usage:
    """The bytes that some images take together, with and without each of them.

    A pack that several images share counts with the largest size that one of them has in it.
    """

    def __init__(self, images: Iterable[Manifest]) -> None:
        self._files: dict[str, int] = {}
        self._packs: dict[int, dict[str, int]] = {}
        for image in images:
            self._files[image.id] = file_bytes(image)
            for pack, size in pack_bytes(image).items():
                self._packs.setdefault(pack, {})[image.id] = size
        packs = sum(max(sizes.values()) for sizes in self._packs.values())
        self.total = packs + sum(self._files.values())

    def remove(self, image: str) -> int:
        """Leave an image out. Returns by how many bytes that reduces the total."""
        freed = self._files.pop(image)
        for sizes in self._packs.values():
            if image in sizes:
                before = max(sizes.values())
                del sizes[image]
                freed += before - max(sizes.values(), default=0)
        self.total -= freed
        return freed
