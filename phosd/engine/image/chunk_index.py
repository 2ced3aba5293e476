"""Find chunks that the images of a user have, so that a new image need not store them again.

Content is shared within one owner only: equal digests mean equal bytes unless somebody knows the
store's secret, and whoever could make two chunks collide would ruin images of their own alone.

The index holds the very entries of the manifests, which the store keeps anyway: one dictionary
entry per distinct chunk, of which a GPU's 141 GB have 70,000. It follows the published images each
time an image is begun, while the program still runs; in its stop each of its chunks is looked up
once.
"""

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.image import private_files
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.manifest import ChunkRef, Manifest
from phosd.engine.image.packs import HEADER, parse_header, record_size
from phosd.engine.image.tier import Tier
from phosd.engine.image.usage import pack_bytes
from phosd.errors import PhosError

_DAMAGED = ".damaged"
"""Ends the names of the marks of packs with a damaged chunk."""
_log = logging.getLogger(__name__)


class KnownChunks:
    """The chunks of published images that one unfinished image may name.

    ``packs`` are those that it may name, with the end in each of what published images need when it
    is begun. So much of them stays as it is until the image is finished. The index may have other
    entries, of images that are gone or younger, which this image has no hold on: they are not
    found.
    """

    def __init__(self, refs: Mapping[str, ChunkRef], packs: Mapping[int, int]) -> None:
        self._refs = refs
        self.packs = packs

    def find(self, digest: str) -> ChunkRef | None:
        """Return the place of the chunk with this digest (hex); None if there is none."""
        ref = self._refs.get(digest)
        # Records do not overlap: what begins before the end of another one ends there at latest.
        return ref if ref is not None and ref.offset < self.packs.get(ref.pack, 0) else None

    @property
    def byte_count(self) -> int:
        """The bytes that an image can have in common with those published, at most."""
        return sum(self.packs.values())


@dataclass
class _Owned:
    images: Mapping[str, Manifest] = field(default_factory=dict)
    refs: dict[str, ChunkRef] = field(default_factory=dict)
    ends: dict[str, Mapping[int, int]] = field(default_factory=dict)
    """The end of the last record in each pack that an image needs, by image."""


class ChunkIndex:
    """The chunks of all published images of a store, by owner and digest. The caller holds the
    store's lock.

    Numbers of packs are never used twice, and a pack does not change once its image is published.
    So an entry is right as long as any image names its pack, up to the last record that one needs:
    what is behind that was perhaps not copied to the disk.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._owned: dict[int, _Owned] = {}
        self._sound: dict[int, bool] = {}

    def known(self, owner: int, tier: Tier, images: Iterable[Manifest]) -> KnownChunks:
        """Return the chunks of the published ``images`` that a new image of this owner in ``tier``
        may name: one on the disk names no pack that is in memory only, and none names a pack that
        is marked as damaged.
        """
        owned = self._update(owner, images)
        disk = self._folder.disk
        there = {number for each in {tier, disk} for number in each.pack_numbers()}
        there -= self._damaged()
        ends: dict[int, int] = {}
        for needed in owned.ends.values():
            for number, end in needed.items():
                ends[number] = max(ends.get(number, 0), end)
        packs = {
            number: end
            for number, end in ends.items()
            if number in there and self._is_sound(number, end, owner)
        }
        return KnownChunks(owned.refs, packs)

    def distrust(self, number: int) -> None:
        """Mark a pack in which a damaged chunk was found: images that are begun from now on store
        the chunks that they would have shared. The lock is not needed.
        """
        try:
            with suppress(FileExistsError):
                private_files.write_durably(self._mark(number), b"")
            private_files.sync_folder(self._folder.disk.packs)
        except OSError as error:
            _log.warning("new images go on sharing the damaged pack %d: %s", number, error)

    def forget_all_but(self, packs: Collection[int]) -> None:
        """Forget what was found out of packs that are gone."""
        self._sound = {number: sound for number, sound in self._sound.items() if number in packs}
        for number in self._damaged() - {*packs}:
            self._mark(number).unlink()

    def _mark(self, number: int) -> Path:
        return self._folder.disk.packs / f"{number}{_DAMAGED}"

    def _damaged(self) -> set[int]:
        names = (path.stem for path in self._folder.disk.packs.glob(f"*{_DAMAGED}"))
        return {int(name) for name in names if name.isdecimal()}

    def _is_sound(self, number: int, end: int, owner: int) -> bool:
        """Return whether a pack is this owner's, and as long as its images say. It is looked at
        once; its chunks are not read.
        """
        if number not in self._sound:
            where = f"pack {number}"
            try:
                pack = private_files.open_private(self._folder.pack_path(number), os.O_RDONLY)
                with os.fdopen(pack, "rb") as file:
                    first = parse_header(file.read(HEADER), 0, where)
                    size = os.fstat(file.fileno()).st_size
                self._sound[number] = first.owner == owner and size >= end
            except (OSError, PhosError) as error:
                _log.warning("%s is not shared with new images: %s", where, error)
                self._sound[number] = False
        return self._sound[number]

    def _update(self, owner: int, images: Iterable[Manifest]) -> _Owned:
        """Follow the published images."""
        theirs = {image.id: image for image in images if image.owner == owner}
        owned = self._owned.setdefault(owner, _Owned())
        if any(theirs.get(name) is not image for name, image in owned.images.items()):
            needed = {pack for image in theirs.values() for pack in pack_bytes(image)}
            # A new dictionary: who began earlier goes on with the old one.
            owned.refs = {d: ref for d, ref in owned.refs.items() if ref.pack in needed}
            owned.ends = {name: ends for name, ends in owned.ends.items() if name in theirs}
        for name, image in theirs.items():
            if owned.images.get(name) is not image:
                _add(owned, image)
        owned.images = theirs
        if not theirs:
            del self._owned[owner]
        return owned


def _add(owned: _Owned, image: Manifest) -> None:
    ends: dict[int, int] = {}
    for block in image.blocks:
        for ref in block.chunks:
            owned.refs[ref.digest] = ref
            end = ref.offset + record_size(ref.length)
            if end > ends.get(ref.pack, 0):
                ends[ref.pack] = end
    owned.ends[image.id] = ends
