"""Manage the folders of an image store: its tiers, lock and secret."""

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from phosd.engine.digest import DigestKey
from phosd.engine.image import private_files
from phosd.engine.image.quota import SpaceReservation
from phosd.engine.image.tier import MemoryTier, Tier
from phosd.errors import Internal

_SECRET = 32
_DIGITS = 20
_log = logging.getLogger(__name__)


class StoreFolder:
    """The tiers of a store: on the disk, in its state folder, and in ``memory`` if there is one.

    Images and packs have names of their own over both tiers, and may be in both. A new state folder
    gets a new secret, or that of ``like``, so that digests agree.
    """

    def __init__(
        self,
        state: Path,
        like: "StoreFolder | None" = None,
        memory: MemoryTier | None = None,
    ) -> None:
        self.state = state
        self._like = like
        self.disk = Tier(state)
        self._memory = memory
        self.reservations: dict[str, SpaceReservation] = {}
        """The bytes that unfinished images are expected to take, by image id."""
        self.pinned: dict[str, Mapping[int, int]] = {}
        """The packs of published images that unfinished ones may name, by the id of the unfinished
        image, with the end of the last record in each. They are neither removed nor rewritten.
        """
        with self._locked_folder():
            self.key = DigestKey(self.secret())
            if memory is not None and not memory.claim(self.key.packed):
                _log.warning(
                    "images go to the disk at once, as %s has those of another state folder%s;"
                    " set state_dir back to have them, or unmount it when nobody needs them",
                    memory.path,
                    ", and memory of suspended programs, which are lost without it"
                    if memory.has_suspended
                    else "",
                )
                self._memory = None
        """The key of every digest in this store."""

    @property
    def memory(self) -> MemoryTier | None:
        """The tier in memory; None if there is none. One that was not there once is none for good:
        what was done meanwhile did not reckon with it.
        """
        if self._memory is not None and not self._memory.is_there:
            _log.warning("%s is not there any more; images go to the disk", self._memory.path)
            self._memory = None
        return self._memory

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers, the faster one first."""
        return [tier for tier in (self.memory, self.disk) if tier is not None]

    def image_folder(self, image_id: str) -> Path:
        """Return the folder of a published image, in the fastest tier that has it."""
        tiers = (tier for tier in self.tiers if tier.has(image_id))
        return next(tiers, self.disk).images / image_id

    def is_durable(self, image_id: str) -> bool:
        """Return whether a published image is on the disk, and not only in memory."""
        return self.disk.has(image_id)

    def pack_path(self, number: int) -> Path:
        """Return the path of pack ``number``, in the fastest tier that has it."""
        paths = [tier.pack_path(number) for tier in self.tiers]
        return next((path for path in paths if path.exists()), paths[-1])

    def pack_numbers(self) -> Sequence[int]:
        """Return the numbers of all existing packs."""
        return sorted({number for tier in self.tiers for number in tier.pack_numbers()})

    def pinned_packs(self) -> set[int]:
        """Return the packs that unfinished images may name. The caller holds the lock."""
        return {number for packs in self.pinned.values() for number in packs}

    def new_pack_numbers(self, count: int) -> Sequence[int]:
        """Return numbers that no pack of this store ever had, also not one in a tier that is not
        there now. The caller holds the lock.
        """
        path = self.state / "next-pack"
        try:
            first = int(private_files.read_private(path, _DIGITS))
        except FileNotFoundError:
            first = 0
        first = max([first, *(number + 1 for number in self.pack_numbers())])
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        private_files.write_durably(partial, str(first + count).encode())
        partial.rename(path)
        private_files.sync_folder(self.state)
        return range(first, first + count)

    def image_names(self) -> Sequence[str]:
        """Return the names of all folders of images, finished or not. Raises :class:`OSError`."""
        return [name for tier in self.tiers for name in tier.names()]

    def free_bytes(self) -> int:
        """Return the free bytes of the disk, plus the bytes of spare packs there."""
        with self.locked():
            return self.disk.free_bytes() + self.disk.spare_bytes()

    def disk_bytes(self) -> int:
        """Return the size of the store's file system, in bytes."""
        status = os.statvfs(self.state)
        return status.f_blocks * status.f_frsize

    def secret(self) -> bytes:
        """Return the secret that the digest key is made of; create it if it does not exist."""
        path = self.state / "secret"
        try:
            secret = private_files.read_private(path, _SECRET)
        except FileNotFoundError:
            secret = self._like.secret() if self._like else secrets.token_bytes(_SECRET)
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            private_files.write_durably(partial, secret)
            partial.rename(path)
            private_files.sync_folder(self.state)
        if len(secret) != _SECRET:
            raise Internal(
                f"{path} has {len(secret)} bytes instead of {_SECRET}",
                hint="bring it back from a backup; no image can be checked without it",
            )
        return secret

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the store. Raises if it is not the store that was there at the start."""
        with self._locked_folder():
            try:
                secret = private_files.read_private(self.state / "secret", _SECRET)
            except OSError as error:
                raise self.unreachable(error) from error
            if DigestKey(secret).packed != self.key.packed:
                raise Internal(
                    f"{self.state} is another store than the one that phosd began with",
                    hint="mount the disk that was there, or restart phosd to use this one",
                )
            yield

    @contextmanager
    def _locked_folder(self) -> Iterator[None]:
        try:
            fd = os.open(self.state / "lock", os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self.unreachable(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            private_files.close_locked(fd)

    def require_writable(self) -> None:
        """Raise :class:`Internal` if the file system is read-only."""
        if os.statvfs(self.state).f_flag & os.ST_RDONLY:
            raise Internal(
                f"{self.state} is on a file system that is read-only",
                hint="see the kernel's log for why, and mount it writable; phosd then goes on",
            )

    def unreachable(self, error: OSError) -> Internal:
        """Return the error for a folder or disk that is gone."""
        return Internal(
            f"the images in {self.state} cannot be reached ({error.strerror})",
            hint="bring the folder or its disk back; phosd then goes on. To begin an empty store,"
            " restart phosd",
        )
