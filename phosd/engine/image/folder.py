"""Manage the folder of an image store: its paths, lock, secret, packs and spares."""

import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from phosd.engine.digest import DigestKey
from phosd.engine.image import private_files
from phosd.engine.image.quota import SpaceReservation
from phosd.errors import Internal

_SECRET = 32


class StoreFolder:
    """The state folder of a store, created (mode 0700) if it does not exist.

    A new folder gets a new secret, or that of ``like``, so that digests agree.
    """

    def __init__(self, state: Path, like: "StoreFolder | None" = None) -> None:
        self.state = state
        self._like = like
        self.images = state / "images"
        self.packs = state / "packs"
        for folder in (state, self.images, self.packs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            private_files.require_private(folder)
        self.reservations: dict[str, SpaceReservation] = {}
        """The bytes that unfinished images are expected to take, by image id."""
        with self._locked_folder():
            self.key = DigestKey(self.secret())
        """The key of every digest in this store."""

    def pack_path(self, number: int) -> Path:
        """Return the path of pack ``number``, whether it exists or not."""
        return self.packs / f"{number}.pack"

    def pack_numbers(self) -> Sequence[int]:
        """Return the numbers of all existing packs."""
        names = (p.name.removesuffix(".pack") for p in self.packs.glob("*.pack"))
        return sorted(int(name) for name in names if name.isdecimal())

    def spare_paths(self) -> Sequence[Path]:
        """Return the spare packs that are complete. The caller holds the store's lock."""
        return [path for path in sorted(self.packs.glob("*.spare")) if private_files.unused(path)]

    def free_bytes(self) -> int:
        """Return the free bytes of the store's file system, plus the bytes of spare packs."""
        status = os.statvfs(self.state)
        with self.locked():
            spare = sum(path.stat().st_size for path in self.spare_paths())
        return status.f_bavail * status.f_frsize + spare

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
