"""Write an image: first packs, then CRIU's files, then the manifest that makes it visible."""

import calendar
import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.image.chunk_index import KnownChunks
from phosd.engine.image.complete import incomplete, require_complete
from phosd.engine.image.equal_files import link_equal
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.mac import sealed
from phosd.engine.image.manifest import MAX_MANIFEST, ChunkRef, FileDigest, Manifest
from phosd.engine.image.packs import CAPACITY, RECORD, pack_count
from phosd.engine.image.quota import SpaceReservation, require_within
from phosd.engine.image.spares import fitting
from phosd.engine.image.tier import MANIFEST, Tier
from phosd.engine.image.usage import file_bytes, pack_bytes, pack_ends
from phosd.engine.image.validate import check_manifest, valid_relative
from phosd.errors import Internal, InvalidOption, OutOfSpace, Reason, Unsupported
from phosd.units import human_bytes

_SYNC_THREADS = 8
_MOST_EARLIER = 20
"""Images in which equal files are looked for."""
_STAMP = "%Y%m%dT%H%M%S"
_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{4}")


def next_id(others: Iterable[str], now: float) -> str:
    """Return an id that sorts behind the ``others``, even if the clock was set back.

    It is the time ``now`` (seconds since the epoch) and four hex digits, or the successor of the
    last.
    """
    first = f"{time.strftime(_STAMP, time.gmtime(now))}-{secrets.randbelow(1 << 12):04x}"
    last = max((name for name in others if _ID.fullmatch(name)), default="")
    if first > last:
        return first
    moment, _, count = last.partition("-")
    following = int(count, 16) + 1
    if following < 1 << 16:
        return f"{moment}-{following:04x}"
    later = calendar.timegm(time.strptime(moment, _STAMP)) + 1
    return f"{time.strftime(_STAMP, time.gmtime(later))}-0000"


class MemoryTierFull(OutOfSpace):
    """The memory tier has no room for what an image has to store, which was expected to be less."""

    code = OutOfSpace.__name__


@dataclass(frozen=True)
class Pack:
    """An empty pack that a mover may fill up to ``capacity`` bytes; the writer owns ``fd``."""

    number: int
    fd: int
    capacity: int = CAPACITY


class ImageWriter:
    """An unfinished image. The end of its context aborts it unless :meth:`publish` was called.

    CRIU's files go to ``folder``, in one sub-folder per tree, and everything to one ``tier``.
    Created by :meth:`Store.begin`.
    """

    def __init__(
        self,
        store: StoreFolder,
        published: Callable[[], list[Manifest]],
        owner: int,
        tier: Tier,
        known: KnownChunks,
        quota: int | None = None,
        suspended: Callable[[int], int] = lambda owner: 0,
    ) -> None:
        self._store = store
        self.tier = tier
        self._known = known
        self._published = published
        self.owner = owner
        self._quota = quota
        self._suspended = suspended
        self._file_bytes = 0
        self._packs: dict[int, Pack] = {}
        self._linked: list[int] = []
        self._finished = False
        self._ended: Callable[[], object] = lambda: None
        self._claimed = 0
        self._claiming = threading.Lock()
        self._room: int | None = None
        self._stored: dict[str, ChunkRef] = {}
        while True:
            self.id = next_id(store.image_names(), time.time())
            self.folder = self.tier.images / self.id
            try:
                self.folder.mkdir(mode=0o700)
                break
            except FileExistsError:
                continue
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def on_end(self, action: Callable[[], object]) -> None:
        """Call ``action`` when the image is published or aborted, without the lock."""
        self._ended = action

    @property
    def shareable_bytes(self) -> int:
        """The bytes that need no storing, at most, as other images of the owner have them."""
        return self._known.byte_count

    def find(self, digest: str) -> ChunkRef | None:
        """Return the place of the chunk with this digest (hex), which this image or the owner's
        others have stored; None if it must be stored. What was found once is found again.
        """
        ref = self._stored.get(digest)
        if ref is None and (ref := self._known.find(digest)) is not None:
            self._stored[digest] = ref
        return ref

    def add(self, refs: Iterable[ChunkRef]) -> None:
        """Note chunks that are stored."""
        self._stored.update((ref.digest, ref) for ref in refs)

    def reserve(self, size: int) -> None:
        """Reserve about ``size`` bytes of the user's quota. Raises :class:`OutOfSpace`."""
        self._store.reservations[self.id] = SpaceReservation(self.owner, size)
        if self._quota is not None:
            others = self._suspended(self.owner)
            require_within(
                self._quota, self.id, self._store.reservations, self._published(), others
            )

    def limit(self, room: int | None) -> None:
        """Store at most ``room`` bytes of chunks, nor more than an earlier call says. None: all."""
        if room is not None:
            self._room = max(0, room if self._room is None else min(room, self._room))

    def claim(self, chunk_count: int) -> None:
        """Say that so many chunks more are going to be stored, before they are. Raises
        :class:`OutOfSpace` if the disk has no room for them, :class:`MemoryTierFull` if the memory
        has none.
        """
        with self._claiming:
            self._claimed += chunk_count * RECORD
            if self._room is None or self._claimed <= self._room:
                return
            what = f"image {self.id} has {human_bytes(self._claimed)} that no other image of uid"
            what += f" {self.owner} has, and the"
            room = f"has room for {human_bytes(self._room)}"
            if self.tier is not self._store.disk:
                raise MemoryTierFull(f"{what} memory tier {room}", hint="it is tried on the disk")
            raise OutOfSpace(
                f"{what} disk {room}",
                hint="delete images (`phos rm`), or put state_dir on a larger disk",
            )

    def packs(self, chunk_count: int) -> list[Pack]:
        """Create empty packs for ``chunk_count`` chunks, which one mover fills in parallel.

        Each mover needs packs of its own. :meth:`publish` removes packs that stay empty.
        """
        with self._store.locked(), private_files.space_errors(f"the packs of image {self.id}"):
            count = pack_count(chunk_count)
            spares = fitting(self.tier.spare_paths(), chunk_count)
            return [
                self._create(number, spares.pop(0) if spares else None)
                for number in self._store.new_pack_numbers(count)
            ]

    def _create(self, number: int, spare: Path | None) -> Pack:
        point(Point.PACK_CREATE)
        path = self.tier.pack_path(number)
        if spare is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o600)
        else:
            spare.rename(path)
            fd = private_files.open_private(path, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._packs[number] = Pack(number, fd)
        return self._packs[number]

    def link(self, packs: Sequence[int]) -> Sequence[int]:
        """Give these open packs of another store names here, too: they are the same files,
        which nobody writes to. Returns their numbers here. The caller keeps them locked until the
        image is published. Raises :class:`OSError` if they are on another file system.
        """
        folder = os.open(self.tier.packs, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with self._store.locked():
                numbers = self._store.new_pack_numbers(len(packs))
                for number, pack in zip(numbers, packs, strict=True):
                    # Python follows the link to the file where a folder is named alone.
                    name = self.tier.pack_path(number).name
                    os.link(f"/proc/self/fd/{pack}", name, dst_dir_fd=folder)
                    self._linked.append(number)
                return numbers
        finally:
            os.close(folder)

    def seal(self, folder: str, once: str = "") -> tuple[FileDigest, ...]:
        """Fsync the files below ``folder`` (relative), and return their digests. Those in its
        sub-folder ``once`` that another image of the owner has in such a folder are kept once.

        Only regular files and folders may be there; all become private to this user.
        """
        if not valid_relative(folder):
            raise InvalidOption(f"{folder!r} is not a folder of an image")
        root = self.folder / folder
        found: list[Path] = []
        for here, folders, names in os.walk(root, followlinks=False):
            Path(here).chmod(0o700)
            found += [Path(here, name) for name in names]
            for name in folders:
                if Path(here, name).is_symlink():
                    raise Internal(f"{Path(here, name)} is a link", hint="CRIU makes none")
        with private_files.space_errors(str(root)), ThreadPoolExecutor(_SYNC_THREADS) as pool:
            digests = tuple(pool.map(lambda path: _seal_file(path, root), sorted(found)))
        if alike := [file for file in digests if once and file.path.startswith(f"{once}/")]:
            link_equal(root, alike, self._earlier(once))
        for here, _, _ in os.walk(root, topdown=False):
            private_files.sync_folder(Path(here))
        self._file_bytes += sum(file.size for file in digests)
        self.reserve(self._file_bytes + self._chunk_bytes())
        return digests

    def _earlier(self, below: str) -> Iterator[tuple[Path, FileDigest]]:
        """Yield the files of the owner's last images in their trees' folders of that name."""
        images = (image for image in self._published() if image.owner == self.owner)
        for image in sorted(images, key=lambda each: each.id, reverse=True)[:_MOST_EARLIER]:
            for tree in image.trees:
                for file in tree.files:
                    if file.path.startswith(f"{below}/"):
                        yield self.tier.images / image.id / tree.folder / file.path, file

    def _chunk_bytes(self) -> int:
        """Return the bytes that are stored for this image and no other."""
        return sum(ref.length for ref in self._stored.values() if ref.pack in self._packs)

    def publish(self, manifest: Manifest) -> None:
        """Make the image visible, after all that its manifest names is in its tier.

        ``manifest.id`` and ``manifest.owner`` must be the writer's. Raises :class:`ImageCorrupt` if
        the manifest is inconsistent, :class:`OutOfSpace` if the disk is full, :class:`Unsupported`
        if the manifest would be too large to be read.
        """
        if manifest.owner != self.owner:
            raise Internal(f"image {self.id} belongs to user {self.owner}, not {manifest.owner}")
        check_manifest(manifest, self.id)
        text = sealed(self._store.key.packed, msgspec.json.encode(manifest))
        if len(text) > MAX_MANIFEST:
            raise Unsupported(
                f"what the manifest of image {self.id} has to say takes "
                f"{human_bytes(len(text))}, more than the {human_bytes(MAX_MANIFEST)} that are "
                "read",
                hint="the program has too many open files, mappings or processes",
                reason=Reason.TOO_LARGE,
            )
        own = {pack: size for pack, size in pack_bytes(manifest).items() if pack in self._packs}
        self.reserve(file_bytes(manifest) + sum(own.values()))
        with private_files.space_errors(f"image {self.id}"):
            self._sync_packs(manifest)
            private_files.sync_folder(self.tier.packs)
            point(Point.MANIFEST_WRITE)
            partial = self.folder / "manifest.partial"
            private_files.write_durably(partial, text)
            private_files.sync_folder(self.folder)
            private_files.sync_folder(self.tier.images)
            # Nobody looks for leftovers between the moment at which the image names its packs and
            # that at which they are no longer locked.
            with self._store.locked():
                require_complete(manifest, self.folder, self._store.pack_path)
                point(Point.MANIFEST_RENAME)
                try:
                    partial.rename(self.folder / MANIFEST)
                    point(Point.MANIFEST_SYNC)
                    private_files.sync_folder(self.folder)
                except BaseException:
                    # As long as the lock is held: others may name packs of what they see.
                    (self.folder / MANIFEST).unlink(missing_ok=True)
                    raise
                self._finished = True
                self._close()
        self._ended()

    def _sync_packs(self, manifest: Manifest) -> None:
        """Fsync each pack, truncated after the last record that the image needs, unless its tier
        keeps packs for other images.
        """
        ends = pack_ends([manifest])

        def sync(pack: Pack) -> None:
            point(Point.PACK_SYNC)
            if pack.number not in ends:
                self.tier.remove_pack(pack.number)
                return
            if (size := os.fstat(pack.fd).st_size) < ends[pack.number]:
                # Below, it would be made as long as it should be.
                why = f"pack {pack.number} has {size} bytes instead of {ends[pack.number]}"
                raise incomplete(manifest.id, why)
            if not self.tier.keeps_packs:
                os.ftruncate(pack.fd, ends[pack.number])
            os.fsync(pack.fd)

        with ThreadPoolExecutor(_SYNC_THREADS) as pool:
            list(pool.map(sync, self._packs.values()))

    def abort(self) -> None:
        """Remove everything that was written. Does nothing after :meth:`publish`."""
        if self._finished:
            return
        self._finished = True
        with self._store.locked():
            (self.folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.folder)
            for number in (*self._packs, *self._linked):
                if self.tier.pack_path(number).exists():
                    self.tier.remove_pack(number)
        self._close()
        self._ended()

    close = abort

    def _close(self) -> None:
        for pack in self._packs.values():
            private_files.close_locked(pack.fd)
        private_files.close_locked(self._lock)
        self._store.reservations.pop(self.id, None)
        self._store.pinned.pop(self.id, None)

    def __enter__(self) -> "ImageWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def _seal_file(path: Path, root: Path) -> FileDigest:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb"):
        point(Point.IMAGE_SEAL)
        os.fchmod(fd, 0o600)
        sha256 = private_files.file_digest(fd)
        os.fsync(fd)
        return FileDigest(str(path.relative_to(root)), os.fstat(fd).st_size, sha256)
