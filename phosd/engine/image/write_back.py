"""Write images that are in memory to the disk, which makes them durable.

An image is published on the disk as in memory: its packs first, then CRIU's files, then the
manifest. What a crash leaves of it is finished or removed later: a pack that is there is complete.
"""

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.image.complete import require_complete
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.manifest import MAX_MANIFEST, Manifest
from phosd.engine.image.note import read_note, write_note
from phosd.engine.image.reader import Image, no_such_image
from phosd.engine.image.tier import MANIFEST
from phosd.engine.image.usage import file_bytes, pack_ends, total_bytes
from phosd.engine.job.progress import Progress
from phosd.errors import ImageCorrupt, NotAuthorized

PARTIAL = ".partial"
"""Ends the names of packs that are not complete."""
_PIECE = 16 << 20
_THREADS = 8
_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)


class WriteBack:
    """The writing of a store's images from memory to the disk. Safe to use from several threads.

    ``opened`` opens an image (:meth:`Store.open`), ``published`` are all images.
    """

    def __init__(
        self,
        store: StoreFolder,
        opened: Callable[[str], AbstractContextManager[Image]],
        published: Callable[[], list[Manifest]],
    ) -> None:
        self._store = store
        self._opened = opened
        self._published = published
        self._changed = threading.Condition()
        self._writing: set[str] = set()
        self._unwanted: set[str] = set()

    def pending(self) -> list[str]:
        """Return the images that are in memory only, oldest first."""
        memory = self._store.memory
        if memory is None:
            return []
        return [each for each in memory.published() if not self._store.is_durable(each)]

    def pending_bytes(self) -> int:
        """Return the bytes that these images are going to take on the disk, at most."""
        pending = {*self.pending()}
        images = [image for image in self._published() if image.id in pending] if pending else []
        return total_bytes(images)

    def write(self, image_id: str, progress: Progress, *, stopped: bool = False) -> None:
        """Write an image, unless it is on the disk already; if another thread writes it, wait.
        ``stopped``: the saved program stands still meanwhile.

        Raises :class:`NoSuchImage` if it is deleted meanwhile, :class:`OutOfSpace` and
        :class:`Cancelled`. It stays in memory then.
        """
        with self._alone(image_id, progress):
            if self._store.is_durable(image_id):
                return
            with self._opened(image_id) as image, self._folder(image_id) as folder:
                sizes = self._pack_sizes(image)
                total = sum(sizes.values()) + file_bytes(image.manifest)
                progress.phase("write", stopped=stopped, bytes_total=total)
                self._copy(image, sizes, folder, progress)
                self._publish(image, folder)
                progress.finish()

    @contextmanager
    def interrupted(self, image_id: str) -> Iterator[None]:
        """Keep an image from being written inside the context."""
        with self._changed:
            self._unwanted.add(image_id)
            while image_id in self._writing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._unwanted.discard(image_id)

    @contextmanager
    def _alone(self, image_id: str, progress: Progress) -> Iterator[None]:
        with self._changed:
            while image_id in self._writing:
                self._changed.wait(_LOOK_SECONDS)
                progress.check()
            self._require_wanted(image_id)
            self._writing.add(image_id)
        try:
            yield
        finally:
            with self._changed:
                self._writing.discard(image_id)
                self._changed.notify_all()

    def _require_wanted(self, image_id: str) -> None:
        if image_id in self._unwanted:
            raise no_such_image(image_id)

    @contextmanager
    def _folder(self, image_id: str) -> Iterator[Path]:
        """Make the image's folder on the disk; remove it at the end unless it was published."""
        disk = self._store.disk
        folder = disk.images / image_id
        with ExitStack() as stack:
            with self._store.locked():
                if folder.exists():  # a crash left it
                    disk.drop(image_id)
                folder.mkdir(mode=0o700)
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(private_files.close_locked, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield folder
            finally:
                if not disk.has(image_id):
                    disk.drop(image_id)

    def _pack_sizes(self, image: Image) -> Mapping[int, int]:
        """Return the bytes of each pack that any image needs, or an unfinished one may name. What
        is behind them is of another image, which had the pack before.

        It is enough for later images, too: they name chunks of packs that others had only if those
        others are there.
        """
        with self._store.locked():
            ends = pack_ends(self._published())
            pinned = [*self._store.pinned.values()]
        return {
            number: max(ends[number], *(packs.get(number, 0) for packs in pinned), 0)
            for number in image.packs
        }

    def _copy(
        self, image: Image, sizes: Mapping[int, int], folder: Path, progress: Progress
    ) -> None:
        image_id = image.manifest.id

        def check() -> None:
            progress.check()
            self._require_wanted(image_id)

        def advance(byte_count: int) -> None:
            with counting:
                progress.advance(byte_count)

        counting = threading.Lock()

        def pack(number: int) -> None:
            source, size = image.packs[number], sizes[number]
            path = self._store.disk.pack_path(number)
            if path.exists():
                advance(size)
                return
            point(Point.WRITE_BACK_PACK)
            partial = path.with_name(f"{number}.{secrets.token_hex(8)}{PARTIAL}")
            try:
                _copy(source, size, partial, check, advance)
                partial.rename(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

        def file(name: tuple[str, str, int]) -> None:
            tree, path, size = name
            target = folder / tree / path
            with os.fdopen(image.open_file(tree, path, lent=True), "rb") as source:
                _copy(source.fileno(), size, target, check, advance)

        files = [(t.folder, f.path, f.size) for t in image.manifest.trees for f in t.files]
        needed = {each for tree, path, _ in files for each in Path(tree, path).parents}
        for each in sorted(needed - {Path()}):
            (folder / each).mkdir(mode=0o700)
        with (
            private_files.space_errors(f"image {image_id}"),
            ThreadPoolExecutor(_THREADS, "write-back") as pool,
        ):
            try:
                list(pool.map(pack, sorted(image.packs)))
                list(pool.map(file, files))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _publish(self, image: Image, folder: Path) -> None:
        disk = self._store.disk
        text = private_files.read_private(MANIFEST, MAX_MANIFEST, dir_fd=image.folder)
        with private_files.space_errors(f"image {image.manifest.id}"):
            private_files.sync_folder(disk.packs)
            for here, _, _ in os.walk(folder, topdown=False):
                private_files.sync_folder(Path(here))
            partial = folder / "manifest.partial"
            private_files.write_durably(partial, text)
            private_files.sync_folder(disk.images)
            with self._store.locked():
                if note := _note_of(image):  # it may have changed until now
                    write_note(folder, note)
                require_complete(image.manifest, folder, disk.pack_path)
                point(Point.WRITE_BACK_MANIFEST)
                partial.rename(folder / MANIFEST)
                private_files.sync_folder(folder)


def _note_of(image: Image) -> str:
    try:
        return read_note(image.folder)
    except (ImageCorrupt, NotAuthorized) as error:
        _log.warning("image %s goes to the disk without its note: %s", image.manifest.id, error)
        return ""


def _copy(
    source: int,
    size: int,
    target: Path,
    check: Callable[[], object],
    advance: Callable[[int], object],
) -> None:
    """Copy the first ``size`` bytes of a file to a new one, and fsync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o600), "wb") as file:
        done = 0
        while done < size:
            check()
            count = os.sendfile(file.fileno(), source, done, min(_PIECE, size - done))
            if not count:
                raise ImageCorrupt(
                    f"{target.name} in memory has {done} bytes instead of {size}",
                    hint="the image cannot be restored; delete it",
                )
            done += count
            advance(count)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
