"""Keep what is known of modules, by the SHA-256 of their bytes and the architecture.

::

    <state>/kernels/<digest>-<architecture>    a sealed JSON object (:class:`Entry`)
    <state>/kernels/lock                       held while an entry grows, or some are removed

It follows from the bytes alone, so all users have it in common. An entry that is damaged, not ours
or from another version does not exist: what it says is found anew. The least recently used ones go
when all take more than ``limit`` bytes.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from phosd.engine.analysis.table import VERSION
from phosd.engine.image import private_files
from phosd.engine.image.mac import sealed, unsealed
from phosd.engine.kernels.entry import ANALYSIS, MOST_KERNELS, Entry, KernelFacts
from phosd.errors import ImageCorrupt, NotAuthorized

LIMIT = 256 << 20
_ENTRY_BYTES = 64 << 20
_PURPOSE = b"phosd kernels 1"
_NAME = re.compile(r"[0-9a-f]{64}-[0-9]{1,4}")
_PARTIAL = ".partial"
_USED_SECONDS = 600.0
"""How exactly it is known when an entry was last used."""
_log = logging.getLogger(__name__)


class Cache:
    """The entries of a store. Safe to use from several threads and processes.

    ``key`` is the store's; ``limit`` the bytes that all entries may take on the disk.
    """

    def __init__(self, state: Path, key: bytes, limit: int = LIMIT) -> None:
        self.folder = state / "kernels"
        self.limit = limit
        self._key = key

    def get(self, digest: str, architecture: int) -> Entry | None:
        """Return what is known of a module; None if that is nothing, or cannot be read."""
        path = self._path(digest, architecture)
        try:
            text = private_files.read_private(path, _ENTRY_BYTES)
            entry = self._opened(text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, NotAuthorized, ImageCorrupt) as error:
            _log.warning("%s is not used, and what it says is found anew: %s", path, error)
            return None
        if entry is None or (entry.digest, entry.architecture) != (digest, architecture):
            return None
        self._note_use(path)
        return entry

    def put(self, entry: Entry) -> None:
        """Store an entry in place of the one that is there. Raises
        :class:`~phosd.errors.OutOfSpace`, and :class:`OSError` if the folder is gone.
        """
        with self._locked():
            self._put(entry)

    def add(self, entry: Entry) -> Entry:
        """Store an entry, with those kernels that only the present one has, and return both as
        one.
        """
        with self._locked():
            before = self.get(entry.digest, entry.architecture)
            if before is not None and before.state is entry.state:
                known: Mapping[str, KernelFacts] = {**before.kernels, **entry.kernels}
                entry = msgspec.structs.replace(
                    entry,
                    kernels=dict(list(known.items())[:MOST_KERNELS]),
                    whole=entry.whole or before.whole,
                )
            self._put(entry)
        return entry

    def _put(self, entry: Entry) -> None:
        path = self._path(entry.digest, entry.architecture)
        partial = path.with_suffix(_PARTIAL)
        partial.unlink(missing_ok=True)
        text = sealed(self._key, msgspec.json.encode(entry), _PURPOSE)
        if len(text) > _ENTRY_BYTES:
            _log.warning("%s would have %d bytes; it is not kept", path, len(text))
            return
        with private_files.space_errors(str(path)):
            private_files.write_durably(partial, text)
        partial.rename(path)
        self._make_room(keep=path.name)

    def size(self) -> int:
        """Return the bytes that all entries take on the disk."""
        return sum(size for _, size, _ in self._entries())

    def _opened(self, text: bytes) -> Entry | None:
        """Return the entry; None if it is another version's. Raises :class:`ValueError`."""
        body = unsealed(self._key, text, _PURPOSE)
        if body is None:
            raise ValueError("it was not written by this store's phosd, or has changed since")
        if msgspec.json.decode(body, type=_Version) != _Version():
            return None
        return msgspec.json.decode(body, type=Entry)

    def _note_use(self, path: Path) -> None:
        with suppress(OSError):  # it has just gone, or the disk is read-only
            if time.time() - path.stat().st_mtime > _USED_SECONDS:
                os.utime(path)

    def _make_room(self, keep: str) -> None:
        """Remove the least recently used entries, without the one that was just written."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.limit:
                break
            if path.name != keep:
                path.unlink(missing_ok=True)
                total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield when each was last used, its bytes on the disk, and its path. What a crash has left
        of others is removed.
        """
        with suppress(FileNotFoundError), os.scandir(self.folder) as found:
            for each in found:
                if each.name.endswith(_PARTIAL):
                    Path(each.path).unlink(missing_ok=True)
                elif _NAME.fullmatch(each.name):
                    with suppress(FileNotFoundError):
                        status = each.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_blocks * 512, Path(each.path)

    def _path(self, digest: str, architecture: int) -> Path:
        return self.folder / f"{digest}-{architecture}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        private_files.require_private(self.folder)
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(self.folder / "lock", flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            private_files.close_locked(file)


class _Version(msgspec.Struct):
    analysis: int = ANALYSIS
    table: int = VERSION
