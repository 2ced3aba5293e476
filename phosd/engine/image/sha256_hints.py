"""Remember by which SHA-256 chunks that a user has are named elsewhere.

A store names chunks by digests that only it can compute, and a machine that has an image to send
names them by SHA-256. What was exported or imported has both names, which are kept for the next
import: a chunk that is here need not be sent. They are hints and no more: who uses one reads the
chunk and compares it.
"""

import logging
import threading
from collections.abc import Mapping

from phosd.engine.digest import SIZE
from phosd.engine.image import private_files
from phosd.engine.image.folder import StoreFolder
from phosd.errors import PhosError

_SHA256 = 32
_ENTRY = _SHA256 + SIZE
_MOST = 1 << 20
"""Entries of a user: 2 TiB of chunks, in 48 MiB."""
_writing = threading.Lock()
"""Held while a file is read and written anew: two jobs of a user may end at once."""
_log = logging.getLogger(__name__)


class Sha256Hints:
    """The names of a user's chunks: digests in hex by SHA-256 in hex. ``owner`` is a user id."""

    def __init__(self, store: StoreFolder, owner: int) -> None:
        self._folder = store.state / "sha256"
        self._path = self._folder / str(owner)

    def read(self) -> dict[str, str]:
        """Return what is known, the oldest first."""
        try:
            data = private_files.read_private(self._path, _MOST * _ENTRY)
        except FileNotFoundError:
            return {}
        except (OSError, PhosError) as error:
            _log.warning("chunks that are here are sent again: %s", error)
            return {}
        entries = (data[at : at + _ENTRY] for at in range(0, len(data) - _ENTRY + 1, _ENTRY))
        return {entry[:_SHA256].hex(): entry[_SHA256:].hex() for entry in entries}

    def add(self, names: Mapping[str, str]) -> None:
        """Remember these, too. The oldest are forgotten when there are too many."""
        partial = self._path.with_name(f"{self._path.name}.partial")
        with _writing:
            found = self.read()
            for sha256, digest in names.items():
                found.pop(sha256, None)
                found[sha256] = digest
            newest = [*found.items()][-_MOST:]
            data = b"".join(bytes.fromhex(sha256 + digest) for sha256, digest in newest)
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                partial.unlink(missing_ok=True)  # of a phosd that was killed
                private_files.write_durably(partial, data)
                partial.rename(self._path)
            except OSError as error:  # what was transferred is as good without
                _log.warning("chunks that are here will be sent again: %s", error)
