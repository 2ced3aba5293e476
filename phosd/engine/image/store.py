"""Manage the image store: a folder of images and packs, owned by root, shared by all jobs.

::

    <state>/secret                     32 bytes, the key of the digests
    <state>/lock                       held while packs or images are added or removed
    <state>/images/<id>/manifest.json  makes the image visible: written last, removed first
    <state>/images/<id>/<folder>/      CRIU's files of one process tree
    <state>/packs/<n>.pack             chunks (see packs.py)
    <state>/packs/<hex>.spare          allocated in advance for a future pack

Rules. An image without a manifest does not exist. A job that writes an image holds a lock (flock)
on the image's folder and on its packs. A folder or pack with neither a manifest nor a lock was left
by a crash, and :meth:`Store.sweep` removes it. A pack is removed only if every manifest could be
read and none names it. A reader opens folder, manifest and packs once, under the store's lock, and
uses those descriptors; it holds a shared lock on the folder, and a locked image is not deleted.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.quota import taken
from phosd.engine.image.reader import (
    Image,
    manifest_stamp,
    no_such_image,
    packs_of,
    read_manifest,
)
from phosd.engine.image.spares import SparePacks
from phosd.engine.image.validate import valid_id
from phosd.engine.image.writer import ImageWriter
from phosd.errors import Busy, ImageCorrupt, NoSuchImage

__all__ = ["Image", "ImageWriter", "Store", "packs_of"]


class Store(StoreFolder):
    """Begin, open and delete the images of a state folder; see :class:`StoreFolder`."""

    def __init__(self, state: Path, like: "Store | None" = None) -> None:
        super().__init__(state, like)
        self.spares = SparePacks(self)
        self._read: dict[str, tuple[tuple[int, ...], Manifest]] = {}

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
        folder = self._open_folder(image_id)
        try:
            stamp = manifest_stamp(folder)
            known = self._read.get(image_id)
            if known is None or known[0] != stamp:
                known = self._read[image_id] = stamp, read_manifest(folder, image_id, self.key)
            return known[1]
        finally:
            os.close(folder)

    @contextmanager
    def open(self, image_id: str) -> "Iterator[Image]":
        """Open an image to restore or verify; its folder and packs are open inside the context.

        Raises :class:`NoSuchImage`, or :class:`ImageCorrupt` if the manifest is damaged or a pack
        is missing.
        """
        with Image() as image:
            with self.locked():
                image.folder = self._open_folder(image_id)
                fcntl.flock(image.folder, fcntl.LOCK_SH)
                image.manifest = read_manifest(image.folder, image_id, self.key)
                for number in sorted(packs_of(image.manifest)):
                    image.packs[number] = self._open_pack(image_id, number)
            yield image

    def begin(
        self,
        owner: int,
        quota: int | None = None,
        suspended: Callable[[int], int] = lambda owner: 0,
    ) -> ImageWriter:
        """Start a new image of user id ``owner``, invisible until the writer publishes it.

        ``quota`` limits the bytes of all images of this user and of the user's suspended programs,
        whose bytes ``suspended`` returns.
        """
        with self.locked():
            self.require_writable()
            return ImageWriter(self, self.list, owner, quota, suspended)

    def taken(self, owner: int) -> int:
        """Return the bytes of a user's images, including unfinished ones."""
        return taken(owner, dict(self.reservations), self.list())

    def delete(self, image_id: str) -> None:
        """Delete an image: first its manifest, then its files and the packs that no image needs.

        Raises :class:`NoSuchImage`, or :class:`Busy` while a job reads the image.
        """
        with self.locked():
            self.require_writable()
            folder = self._open_folder(image_id)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                point(Point.DELETE_MANIFEST)
                os.unlink("manifest.json", dir_fd=folder)
                os.fsync(folder)
            except FileNotFoundError:
                raise no_such_image(image_id) from None
            except BlockingIOError:
                raise Busy(
                    f"image {image_id} is being read by a job", hint="wait for it (`phos jobs`)"
                ) from None
            finally:
                private_files.close_locked(folder)
            point(Point.DELETE_FOLDER)
            shutil.rmtree(self.images / image_id)
            private_files.sync_folder(self.images)
            self._remove_packs()

    def sweep(self) -> Sequence[str]:
        """Remove what crashed jobs left. Returns the names of what was removed."""
        removed = []
        with self.locked():
            for folder in sorted(self.images.iterdir()):
                if not (folder / "manifest.json").exists() and private_files.unused(folder):
                    shutil.rmtree(folder)
                    removed.append(folder.name)
            private_files.sync_folder(self.images)
            return [*removed, *self._remove_packs()]

    def _published(self) -> Sequence[str]:
        try:
            folders = list(self.images.iterdir())
        except OSError as error:
            raise self.unreachable(error) from error
        return sorted(
            folder.name
            for folder in folders
            if valid_id(folder.name) and (folder / "manifest.json").exists()
        )

    def _open_folder(self, image_id: str) -> int:
        if not valid_id(image_id):
            raise NoSuchImage(f"{image_id!r} is not the id of an image", hint="see `phos images`")
        try:
            return private_files.open_private(self.images / image_id, os.O_DIRECTORY)
        except FileNotFoundError as error:
            if not self.images.exists():
                raise self.unreachable(error) from error
            raise no_such_image(image_id) from None

    def _open_pack(self, image_id: str, number: int) -> int:
        try:
            return private_files.open_private(self.pack_path(number), os.O_RDONLY)
        except FileNotFoundError:
            raise ImageCorrupt(
                f"pack {number} of image {image_id} is missing",
                hint="the image cannot be restored; delete it",
            ) from None
        except OSError as error:
            raise ImageCorrupt(
                f"pack {number} of image {image_id} is no file of phosd's ({error.strerror})",
                hint=f"see who has replaced {self.pack_path(number)}",
            ) from error

    def _remove_packs(self) -> Sequence[str]:
        """Remove packs that no image names and no writer holds. The caller holds the lock."""
        try:
            needed = {n for i in self._published() for n in packs_of(self.get(i))}
        except ImageCorrupt:
            return []  # its packs cannot be told from leftovers, so keep all until it is deleted
        removed = []
        for number in self.pack_numbers():
            path = self.pack_path(number)
            if number not in needed and private_files.unused(path):
                point(Point.DELETE_PACK)
                path.unlink()
                removed.append(path.name)
        private_files.sync_folder(self.packs)
        return removed
