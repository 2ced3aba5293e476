"""What images take on the disk: equal chunks are stored once, and may be shared by several images.

Sizes are those that the manifests tell, in bytes. A pack holds chunks of one user's images only.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from phosd.engine.image.manifest import Manifest

_MOST_KNOWN = 4096
_known: dict[str, tuple[Manifest, Mapping[int, int]]] = {}


def pack_bytes(manifest: Manifest) -> Mapping[int, int]:
    """What an image has in each pack, in bytes."""
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


def file_bytes(manifest: Manifest) -> int:
    """What CRIU wrote, in bytes."""
    return sum(file.size for tree in manifest.trees for file in tree.files)


class Usage:
    """What some images take together, and what it would be without one of them.

    Of a pack that several share, it is what the one with the most has in it.
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
        """Leave an image out; by how many bytes the total is less now."""
        freed = self._files.pop(image)
        for sizes in self._packs.values():
            if image in sizes:
                before = max(sizes.values())
                del sizes[image]
                freed += before - max(sizes.values(), default=0)
        self.total -= freed
        return freed
