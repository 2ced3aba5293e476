"""Copy the memory pages of a dump to memory allocated before the stop.

``page_store.cpp``, loaded into ``criu dump``, copies pages with many threads into the store, and
writes a ledger of their places. The dump's files lack these bytes until :meth:`PageStore.complete`
adds them, when the program runs again.
"""

import errno
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.system.native import pages_library
from phosd.engine.system.prefault import allocate
from phosd.errors import Internal, Timeout

_MAGIC = 0x5345474150534F50
_HEAD = struct.Struct("<QQQ")
_COUNTS = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQQQQ")
_ENTRIES = 1 << 15
"""Pieces that a ledger has room for, mostly of 1 MiB. CRIU itself writes those beyond."""
_DATA = -(-(_HEAD.size + _COUNTS.size + _ENTRIES * _ENTRY.size) // mmap.PAGESIZE) * mmap.PAGESIZE
_TIMEOUT = 60.0


class _Entry(NamedTuple):
    """``length`` bytes at ``place`` in the store, which belong at ``position`` in a file."""

    device: int
    inode: int
    position: int
    place: int
    length: int


class PageStore:
    """Room for ``byte_count`` bytes of pages in ``folder``, which is in memory."""

    def __init__(self, folder: Path, byte_count: int) -> None:
        self.descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        # CRIU may run as a user who cannot reach the library's path (a checkout below /root).
        self._library = os.open(pages_library(), os.O_RDONLY)
        try:
            # Make the kernel, and a hypervisor, allocate the pages now, not during the stop.
            allocate(self.descriptor, _DATA + byte_count)
            os.pwrite(self.descriptor, _HEAD.pack(_MAGIC, _DATA, _ENTRIES), 0)
            self._ledger = mmap.mmap(self.descriptor, _DATA, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self.descriptor)
            os.close(self._library)
            raise

    @classmethod
    def if_there_is_room(cls, folder: Path, byte_count: int) -> Self | None:
        """Return a store, or None if ``folder`` or the memory has no room for it."""
        try:
            return cls(folder, byte_count)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            return None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which CRIU finds the store."""
        return {
            "LD_PRELOAD": f"/proc/self/fd/{self._library}",
            "PHOS_PAGES": str(self.descriptor),
        }

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that CRIU must inherit."""
        return [self.descriptor, self._library]

    def wait(self, running: Callable[[], bool]) -> None:
        """Wait until all pages that CRIU submitted are copied. CRIU must have submitted all.

        ``running`` tells whether CRIU, whose threads copy, still runs. Raises :class:`Internal` if
        it does not, or if a copy failed, and :class:`Timeout`.
        """
        give_up = time.monotonic() + _TIMEOUT
        while True:
            copying = running()  # asked first: its last copies count
            submitted, completed, failed = _COUNTS.unpack_from(self._ledger, _HEAD.size)
            if failed:
                raise Internal("copying pages of memory failed", hint="try again")
            if submitted == completed:
                return
            if not copying:
                raise Internal(
                    "criu dump ended before it had copied all pages of memory",
                    hint="somebody with its user's rights has ended it; try again",
                )
            if time.monotonic() > give_up:
                raise Timeout("copying pages of memory takes too long", hint="try again")
            time.sleep(0.0005)

    def complete(self, dump: Path, copy: Path) -> None:
        """Write the pages into the files of ``copy``, a copy of CRIU's files in ``dump``."""
        names = {_identity(path): path.relative_to(dump) for path in dump.rglob("*.img")}
        for name, entries in self._by_file(names).items():
            with (copy / name).open("r+b") as file:
                for entry in entries:
                    self._put(file.fileno(), entry)

    def close(self) -> None:
        """Free the memory."""
        self._ledger.close()
        os.close(self.descriptor)
        os.close(self._library)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _by_file(self, names: dict[tuple[int, int], Path]) -> dict[Path, list[_Entry]]:
        found: dict[Path, list[_Entry]] = {}
        for entry in self._entries():
            name = names.get((entry.device, entry.inode))
            if name is None:
                raise Internal("CRIU has saved pages of a file that is not there", "report this")
            found.setdefault(name, []).append(entry)
        return found

    def _entries(self) -> Iterator[_Entry]:
        """Yield the ledger's entries, validated, since CRIU may run as the program's owner."""
        count, _, _ = _COUNTS.unpack_from(self._ledger, _HEAD.size)
        end = os.fstat(self.descriptor).st_size
        for index in range(min(count, _ENTRIES)):
            at = _HEAD.size + _COUNTS.size + index * _ENTRY.size
            entry = _Entry(*_ENTRY.unpack_from(self._ledger, at))
            if not _DATA <= entry.place <= entry.place + entry.length <= end:
                raise Internal("the ledger of saved pages is damaged", hint="try again")
            yield entry

    def _put(self, target: int, entry: _Entry) -> None:
        done = 0
        while done < entry.length:
            os.lseek(target, entry.position + done, os.SEEK_SET)
            done += os.sendfile(target, self.descriptor, entry.place + done, entry.length - done)


class CopiedPages(CriuPart):
    """Gives CRIU a ``store`` for pages, and keeps the tree frozen until all of them are there.

    ``goes_on`` tells whether CRIU has not ended.
    """

    def __init__(self, store: PageStore, goes_on: Callable[[], bool]) -> None:
        self._store = store
        self._goes_on = goes_on

    @property
    def environment(self) -> Mapping[str, str]:
        return self._store.environment

    @property
    def descriptors(self) -> Sequence[int]:
        return self._store.descriptors

    def frozen(self, tree: TreeResources) -> None:
        self._store.wait(self._goes_on)


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
