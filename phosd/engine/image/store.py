"""The image store: one folder of images and packs, owned by root, shared by concurrent jobs.

::

    <state>/secret                     32 bytes, the key of the digests
    <state>/lock                       held while packs or images come or go
    <state>/images/<id>/manifest.json  makes the image visible: written last, removed first
    <state>/images/<id>/<folder>/      CRIU's files of one process tree
    <state>/packs/<n>.pack             chunks (see packs.py)
    <state>/packs/<hex>.spare          room set aside for a pack to come

Rules. An image without a manifest does not exist. A job that writes an image holds a lock (flock)
on the image's folder and on its packs; what has neither a manifest nor a lock is the leftover of a
crash, and :meth:`Store.sweep` removes it. A pack is removed only when every manifest could be read
and none names it. A reader opens folder, manifest and packs once, under the store's lock, and works
on those descriptors; it shares a lock on the folder, and a locked image is not deleted.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.mac import unsealed
from phosd.engine.image.manifest import CHUNK, FORMAT, Manifest
from phosd.engine.image.packs import CAPACITY, RECORD, pack_count
from phosd.engine.image.quota import taken
from phosd.engine.image.reader import Image, packs_of
from phosd.engine.image.validate import check_manifest, valid_id
from phosd.engine.image.writer import ImageWriter
from phosd.errors import Busy, ImageCorrupt, NoSuchImage, OutOfSpace

__all__ = ["Image", "ImageWriter", "Store", "packs_of"]

MAX_MANIFEST = 256 << 20
"""Bytes of a manifest; one of 8 GPUs with 141 GB each takes about 50 MB."""
_THREADS = 8
_decoder = msgspec.json.Decoder(Manifest)


class _Format(msgspec.Struct):
    """What is read of a manifest before it is known how to read the rest."""

    format: int = FORMAT


_format_decoder = msgspec.json.Decoder(_Format)


class Store(StoreFolder):
    """The images of a state folder; see :class:`StoreFolder`."""

    def __init__(self, state: Path, like: "Store | None" = None) -> None:
        super().__init__(state, like)
        self._read: dict[str, tuple[tuple[int, ...], Manifest]] = {}

    def list(self) -> list[Manifest]:
        """All published images, oldest first. A damaged one is left out; :meth:`damaged` has it."""
        found = []
        for image_id in self._published():
            with suppress(ImageCorrupt, NoSuchImage):
                found.append(self.get(image_id))
        self._read = {image.id: self._read[image.id] for image in found if image.id in self._read}
        return found

    def damaged(self) -> dict[str, ImageCorrupt]:
        """The published images whose manifest cannot be read, and why."""
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
        """The manifest of an image. Raises :class:`NoSuchImage` or :class:`ImageCorrupt`."""
        folder = self._open_folder(image_id)
        try:
            stamp = _stamp(folder)
            known = self._read.get(image_id)
            if known is None or known[0] != stamp:
                known = self._read[image_id] = stamp, self._read_manifest(image_id, folder)
            return known[1]
        finally:
            os.close(folder)

    @contextmanager
    def open(self, image_id: str) -> "Iterator[Image]":
        """An image to restore or verify, its folder and packs open until the context ends.

        Raises :class:`NoSuchImage`, or :class:`ImageCorrupt` when the manifest is damaged or a pack
        is missing.
        """
        with Image() as image:
            with self.locked():
                image.folder = self._open_folder(image_id)
                fcntl.flock(image.folder, fcntl.LOCK_SH)
                image.manifest = self._read_manifest(image_id, image.folder)
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

        ``quota`` is how many bytes all images of this user may take, with what ``suspended`` tells
        of the user's suspended programs.
        """
        with self.locked():
            self.require_writable()
            return ImageWriter(self, self.list, owner, quota, suspended)

    def taken(self, owner: int) -> int:
        """Bytes that a user's images take, those that are being made included."""
        return taken(owner, dict(self.reservations), self.list())

    def delete(self, image_id: str) -> None:
        """Delete an image: its manifest first, then its files and the packs that nothing needs.

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
                raise _unknown(image_id) from None
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
        """Remove what crashed jobs left; returns the names of what was removed."""
        removed = []
        with self.locked():
            for folder in sorted(self.images.iterdir()):
                if not (folder / "manifest.json").exists() and private_files.unused(folder):
                    shutil.rmtree(folder)
                    removed.append(folder.name)
            private_files.sync_folder(self.images)
            return [*removed, *self._remove_packs()]

    def preallocate(self, byte_count: int) -> None:
        """Set room aside for an image with ``byte_count`` bytes of chunks.

        A checkpoint into memory (tmpfs) is several times faster when the pages are there already.
        Raises :class:`OutOfSpace`.
        """
        chunks = -(-byte_count // CHUNK)
        count = pack_count(chunks)
        with self.locked():
            missing = count - len(self.spares())
        if missing <= 0:
            return
        size = min(CAPACITY, -(-chunks // count) * RECORD)
        if missing * size > self.free_bytes():
            raise OutOfSpace(
                f"{self.state} has no room for {byte_count} bytes of device memory",
                hint="delete images (`phos rm`) or give the store a larger disk",
            )
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._make_spare, [size] * missing))

    def _make_spare(self, size: int) -> None:
        path = self.packs / f"{secrets.token_hex(8)}.spare"
        with self.locked():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            with private_files.space_errors(str(path)):
                os.posix_fallocate(fd, 0, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            private_files.close_locked(fd)

    def drop_spares(self) -> None:
        """Give back what :meth:`preallocate` set aside and no image took."""
        with self.locked():
            for path in self.spares():
                path.unlink()

    def free_bytes(self) -> int:
        """What the file system of the store can still take, and what is set aside, in bytes."""
        status = os.statvfs(self.state)
        with self.locked():
            spare = sum(path.stat().st_size for path in self.spares())
        return status.f_bavail * status.f_frsize + spare

    def disk_bytes(self) -> int:
        """The size of the file system of the store, in bytes."""
        status = os.statvfs(self.state)
        return status.f_blocks * status.f_frsize

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
            raise _unknown(image_id) from None

    def _read_manifest(self, image_id: str, folder: int) -> Manifest:
        try:
            text = private_files.read_private("manifest.json", MAX_MANIFEST, dir_fd=folder)
        except FileNotFoundError:
            raise _unknown(image_id) from None
        body = unsealed(self.key.packed, text)
        if body is None:
            raise ImageCorrupt(
                f"the manifest of image {image_id} is not what was written (its seal is broken)",
                hint="the image cannot be restored; delete it",
            )
        try:
            made_as = _format_decoder.decode(body).format
            if made_as != FORMAT:
                raise ImageCorrupt(
                    f"image {image_id} has format {made_as}, this phosd reads {FORMAT}",
                    hint="restore it with the phosd that made it, or delete it",
                )
            manifest = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ImageCorrupt(
                f"the manifest of image {image_id} cannot be read ({error})",
                hint="the image cannot be restored; delete it",
            ) from error
        check_manifest(manifest, image_id)
        return manifest

    def _open_pack(self, image_id: str, number: int) -> int:
        try:
            return private_files.open_private(self.pack_path(number), os.O_RDONLY)
        except FileNotFoundError:
            raise ImageCorrupt(
                f"pack {number} of image {image_id} is missing",
                hint="the image cannot be restored; delete it",
            ) from None

    def _remove_packs(self) -> Sequence[str]:
        """Remove the packs that no image names and no writer holds. The caller holds the lock."""
        try:
            needed = {n for i in self._published() for n in packs_of(self.get(i))}
        except ImageCorrupt:
            return []  # its packs cannot be told from leftovers: keep them until it is deleted
        removed = []
        for number in self.pack_numbers():
            path = self.pack_path(number)
            if number not in needed and private_files.unused(path):
                point(Point.DELETE_PACK)
                path.unlink()
                removed.append(path.name)
        private_files.sync_folder(self.packs)
        return removed


def _stamp(folder: int) -> tuple[int, ...]:
    """Differs when another manifest is in the folder, or something was written to it."""
    try:
        status = os.stat("manifest.json", dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _unknown(image_id: str) -> NoSuchImage:
    return NoSuchImage(f"there is no image {image_id}", hint="see `phos images`")
