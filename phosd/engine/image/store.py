"""Manage the image store: a folder of images and packs, owned by root, shared by all jobs.

::

    <state>/secret                     32 bytes, the key of the digests
    <state>/lock                       held while packs or images are added or removed
    <state>/images/<id>/manifest.json  makes the image visible: written last, removed first
    <state>/images/<id>/<folder>/      CRIU's files of one process tree
    <state>/images/<id>/note           its owner's line, if there is one (note.py)
    <state>/packs/<n>.pack             chunks (see packs.py)
    <state>/packs/<n>.damaged          the pack has a damaged chunk: no new image names it
    <state>/packs/<hex>.spare          allocated in advance for a future pack

A store may have a second tier in memory, with images and packs like those of the state folder. An
image is written there if there is room, and to the disk afterwards (``write_back.py``). Then it is
durable, and its copy in memory stays until another image needs the room. A reader of an
image takes each file from memory if it is there.

Rules. An image without a manifest does not exist. A job that writes an image holds a lock (flock)
on the image's folder and on its packs. A folder or pack with neither a manifest nor a lock was left
by a crash, and :meth:`Store.sweep` removes it. A pack is removed only if every manifest could be
read and none names it, and no unfinished image may name it (``chunk_index.py``). A reader opens
folder, manifest and packs once, under the store's lock, and uses those descriptors; it holds a
shared lock on the folder, and a locked image is not deleted.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.image.chunk_index import ChunkIndex
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.note import checked_note, read_note, write_note
from phosd.engine.image.quota import SpaceReservation, taken
from phosd.engine.image.reader import (
    Image,
    manifest_stamp,
    no_such_image,
    packs_of,
    read_manifest,
)
from phosd.engine.image.spares import SparePacks
from phosd.engine.image.tier import MANIFEST, ExpectedSize, MemoryTier, Tier
from phosd.engine.image.validate import valid_id
from phosd.engine.image.write_back import PARTIAL, WriteBack
from phosd.engine.image.writer import ImageWriter
from phosd.errors import Busy, ImageCorrupt, Internal, NoSuchImage, NotAuthorized

__all__ = ["Image", "ImageWriter", "Store", "packs_of"]

_log = logging.getLogger(__name__)


class Store(StoreFolder):
    """Begin, open and delete the images of a state folder; see :class:`StoreFolder`."""

    def __init__(
        self, state: Path, like: "Store | None" = None, memory: MemoryTier | None = None
    ) -> None:
        super().__init__(state, like, memory)
        self.spares = SparePacks(self)
        self.write_back = WriteBack(self, self.open, self.list)
        self._read: dict[str, tuple[tuple[int, ...], Manifest]] = {}
        self._bad_notes: set[str] = set()
        self._index = ChunkIndex(self)
        self._left_packs = False

    def list(self) -> list[Manifest]:
        """Return all published images, oldest first, without damaged ones (see :meth:`damaged`)."""
        found = []
        for image_id in self._published():
            with suppress(ImageCorrupt, NoSuchImage):
                found.append(self.get(image_id))
        self._read = {image.id: self._read[image.id] for image in found if image.id in self._read}
        return found

    def damaged(self) -> dict[str, ImageCorrupt]:
        """Return the published images whose manifest cannot be read, with the error."""
        found = {}
        for image_id in self._published():
            try:
                self.get(image_id)
            except ImageCorrupt as error:
                found[image_id] = error
            except NoSuchImage:
                continue
        return found

    def get(self, image_id: str) -> Manifest:
        """Return the manifest of an image. Raises :class:`NoSuchImage` or :class:`ImageCorrupt`."""
        try:
            return self._get(image_id)
        except NoSuchImage:  # its copy in memory was dropped at this moment
            if not valid_id(image_id) or not self.is_durable(image_id):
                raise
            return self._get(image_id)

    def _get(self, image_id: str) -> Manifest:
        folder = self._open_folder(image_id)
        try:
            return self._manifest(folder, image_id)
        finally:
            os.close(folder)

    def _manifest(self, folder: int, image_id: str) -> Manifest:
        """Return the manifest in an open folder, which is read anew if it was written to."""
        stamp, known = manifest_stamp(folder), self._read.get(image_id)
        if known is None or known[0] != stamp:
            known = self._read[image_id] = stamp, self._read_manifest(folder, image_id)
        return known[1]

    def _read_manifest(self, folder: int, image_id: str) -> Manifest:
        return read_manifest(folder, image_id, self.key)

    @contextmanager
    def open(self, image_id: str, *, known: bool = False) -> "Iterator[Image]":
        """Open an image to restore or verify; its folder and packs are open inside the context.
        ``known``: its manifest need not be read again if it was, and was not written to since.

        Raises :class:`NoSuchImage`, or :class:`ImageCorrupt` if the manifest is damaged or a pack
        is missing.
        """
        with Image() as image:
            with self.locked():
                image.folder = self._open_folder(image_id)
                fcntl.flock(image.folder, fcntl.LOCK_SH)
                read = self._manifest if known else self._read_manifest
                image.manifest = read(image.folder, image_id)
                for number in sorted(packs_of(image.manifest)):
                    image.packs[number] = self._open_pack(image_id, number)
            yield image

    def begin(
        self,
        owner: int,
        quota: int | None = None,
        suspended: Callable[[int], int] = lambda owner: 0,
        size: ExpectedSize | None = None,
    ) -> ImageWriter:
        """Start a new image of user id ``owner``, invisible until the writer publishes it.

        ``quota`` limits the bytes of all images of this user and of the user's suspended programs,
        whose bytes ``suspended`` returns. If the tier in memory has room for the expected
        ``size``, the image is written there.
        """
        with self.locked():
            self.require_writable()
            tier = (self._room_in_memory(size) if size is not None else None) or self.disk
            known = self._index.known(owner, tier, self.list())
            writer = ImageWriter(self, self.list, owner, tier, known, quota, suspended)
            writer.on_end(self._remove_left_packs)
            self.pinned[writer.id] = known.packs
            if size is not None:
                if isinstance(tier, MemoryTier):
                    writer.limit(self._room_for_chunks(tier, size))
                self.reservations[writer.id] = SpaceReservation(owner, size.total)
            return writer

    def shareable_bytes(self, owner: int) -> int:
        """Return the bytes that a new image need not store, at most, as other images have them."""
        with self.locked():
            return self._index.known(owner, self.tiers[0], self.list()).byte_count

    def distrust(self, number: int) -> None:
        """Mark a pack in which a damaged chunk was found: images that are begun from now on store
        the chunks that they would have shared.
        """
        self._index.distrust(number)

    def taken(self, owner: int) -> int:
        """Return the bytes of a user's images, including unfinished ones."""
        return taken(owner, dict(self.reservations), self.list())

    def delete(self, image_id: str) -> None:
        """Delete an image: first its manifest, then its files and the packs that no image needs.

        Raises :class:`NoSuchImage`, or :class:`Busy` while a job reads the image.
        """
        with self.write_back.interrupted(image_id), self.locked():
            self.require_writable()
            os.close(self._open_folder(image_id))
            tiers = [tier for tier in self.tiers if tier.has(image_id)]
            if not tiers:
                raise no_such_image(image_id)
            with _unread(tiers, image_id) as folders:
                point(Point.DELETE_MANIFEST)
                for folder in folders:  # the one on the disk is the last
                    os.unlink(MANIFEST, dir_fd=folder)
                    os.fsync(folder)
            point(Point.DELETE_FOLDER)
            for tier in tiers:
                tier.drop(image_id)
            self._remove_packs()

    def notes(self) -> dict[str, str]:
        """Return the notes of the published images that have one. An invalid note file is ignored,
        which is logged once: the image can be restored all the same.
        """
        found = {}
        for image_id in self._published():
            try:
                text = read_note(self._kept_in(image_id))
            except (ImageCorrupt, NotAuthorized) as error:
                if image_id not in self._bad_notes:
                    _log.warning("image %s is shown without its note: %s", image_id, error)
                    self._bad_notes.add(image_id)
                continue
            if text:
                found[image_id] = text
        return found

    def set_note(self, image_id: str, text: str) -> None:
        """Give an image another note; an empty one takes it away.

        Raises :class:`NoSuchImage`, :class:`~phosd.errors.InvalidOption` and
        :class:`~phosd.errors.OutOfSpace`.
        """
        text = checked_note(text)
        with self.locked():
            self.require_writable()
            os.close(self._open_folder(image_id))
            if not any(tier.has(image_id) for tier in self.tiers):
                raise no_such_image(image_id)
            write_note(self._kept_in(image_id), text)
            self._bad_notes.discard(image_id)

    def _kept_in(self, image_id: str) -> Path:
        """Return the folder of a published image that outlives its copy in memory, if any does."""
        tier = self.disk if self.is_durable(image_id) else self.memory or self.disk
        return tier.images / image_id

    def sweep(self) -> Sequence[str]:
        """Remove what crashed jobs left. Returns the names of what was removed."""
        removed = []
        with self.locked():
            for tier in self.tiers:
                for folder in sorted(tier.images.iterdir()):
                    if not (folder / MANIFEST).exists() and private_files.unused(folder):
                        shutil.rmtree(folder)
                        removed.append(folder.name)
                private_files.sync_folder(tier.images)
            for path in self.disk.packs.glob(f"*{PARTIAL}"):
                if private_files.unused(path):
                    path.unlink()
                    removed.append(path.name)
            return [*removed, *self._remove_packs()]

    def _published(self) -> Sequence[str]:
        try:
            return sorted({image_id for tier in self.tiers for image_id in tier.published()})
        except OSError as error:
            raise self.unreachable(error) from error

    def _room_in_memory(self, size: ExpectedSize) -> MemoryTier | None:
        """Return the tier in memory if it has room for an image, besides what unfinished ones are
        expected to take. Drops copies of durable images, the oldest first, and spare packs.
        """
        memory = self.memory
        others = sum(each.size for each in dict(self.reservations).values())
        if memory is None or size.total + others > memory.limit:
            return None

        def has_room() -> bool:
            return memory.has_room(size.files, size.chunks, others)

        for image_id in list(memory.published()):
            if has_room():
                return memory
            if self.is_durable(image_id) and private_files.unused(memory.images / image_id):
                memory.drop(image_id)
                self._remove_packs()
        while not has_room():
            if not memory.drop_spare():
                return None
        return memory

    def _room_for_chunks(self, memory: MemoryTier, size: ExpectedSize) -> int | None:
        """Return how many bytes of chunks the tier in memory takes; None if it takes all."""
        others = sum(each.size for each in dict(self.reservations).values())
        if memory.has_room(size.files, size.most, others):
            return None
        return memory.room(size.files, others)

    def _open_folder(self, image_id: str) -> int:
        if not valid_id(image_id):
            raise NoSuchImage(f"no image is called {image_id!r}", hint="see `phos images`")
        try:
            return private_files.open_private(self.image_folder(image_id), os.O_DIRECTORY)
        except FileNotFoundError as error:
            if not self.disk.is_there:
                raise self.unreachable(error) from error
            raise no_such_image(image_id) from None

    def _open_pack(self, image_id: str, number: int) -> int:
        """Open a pack, and keep it from becoming a spare pack. The caller holds the lock."""
        try:
            pack = private_files.open_private(self.pack_path(number), os.O_RDONLY)
            fcntl.flock(pack, fcntl.LOCK_SH)
            return pack
        except FileNotFoundError:
            raise ImageCorrupt(
                f"pack {number} of image {image_id} is missing",
                hint="the image cannot be restored; delete it",
            ) from None
        except OSError as error:
            raise ImageCorrupt(
                f"pack {number} of image {image_id} is not phosd's file ({error.strerror})",
                hint=f"see who has replaced {self.pack_path(number)}",
            ) from error

    def _remove_packs(self) -> Sequence[str]:
        """Remove packs that no image names and no writer holds or may name, and copies in memory of
        packs that no image there names. The caller holds the lock.
        """
        pinned = self.pinned_packs()
        try:
            needed = {n for i in self._published() for n in packs_of(self.get(i))}
            near = self.memory.published() if self.memory is not None else ()
            needed_near = {n for i in near for n in packs_of(self.get(i))}
        except ImageCorrupt:
            return []  # its packs cannot be told from leftovers, so keep all until it is deleted
        unneeded: list[tuple[Tier, int, bool]] = []
        for tier in self.tiers:
            for number in tier.pack_numbers():
                path = tier.pack_path(number)
                is_copy = tier is not self.disk and self.disk.pack_path(number).exists()
                if number in (needed_near if is_copy else needed) or not private_files.unused(path):
                    continue
                if number in pinned and not is_copy:
                    self._left_packs = True
                    continue
                unneeded.append((tier, number, is_copy))
        self.require_unneeded({number for _, number, is_copy in unneeded if not is_copy})
        removed = []
        for tier, number, _ in unneeded:
            point(Point.DELETE_PACK)
            tier.remove_pack(number)
            removed.append(tier.pack_path(number).name)
        for tier in self.tiers:
            private_files.sync_folder(tier.packs)
        self._index.forget_all_but(self.pack_numbers())
        return removed

    def require_unneeded(self, packs: Collection[int]) -> None:
        """Raise :class:`Internal` before packs are removed for good that are needed (invariant 7):
        a manifest that is read now names one, or cannot be read, or an unfinished image may name
        one. The caller holds the lock.
        """
        if not packs:
            return
        if damaged := self.damaged():
            raise _needed(min(packs), f"image {min(damaged)}, which cannot be read, may name it")
        for image_id in self._published():
            if named := packs_of(self.get(image_id)) & {*packs}:
                raise _needed(min(named), f"image {image_id} names it")
        if pinned := self.pinned_packs() & {*packs}:
            raise _needed(min(pinned), "an unfinished image may name it")

    def _remove_left_packs(self) -> None:
        """Remove the packs that were kept for an unfinished image only, which has ended."""
        if not self._left_packs:
            return
        try:
            with self.locked():
                self._left_packs = False
                self._remove_packs()
        except (OSError, Internal) as error:
            _log.warning("packs that no image needs are removed with the next image: %s", error)


def _needed(pack: int, why: str) -> Internal:
    return Internal(
        f"pack {pack} would be removed although it may be needed (invariant 7): {why}",
        hint="it was kept; this is a defect of phosd",
    )


@contextmanager
def _unread(tiers: Sequence[Tier], image_id: str) -> Iterator[list[int]]:
    """Yield the open folders of an image, locked. Raises :class:`Busy` while a job reads it."""
    with ExitStack() as opened:
        folders = []
        for tier in tiers:
            folder = private_files.open_private(tier.images / image_id, os.O_DIRECTORY)
            opened.callback(private_files.close_locked, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"image {image_id} is being read by a job", hint="wait for it (`phos jobs`)"
                ) from None
            folders.append(folder)
        yield folders
