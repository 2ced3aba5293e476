"""Empty files that a rehearsal's tree has in the place of those that it would write to."""

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.criu.images.saved_files import SavedFiles
from phosd.engine.criu.run.invocation import Owner
from phosd.errors import OutOfSpace


@dataclass
class StandIns:
    """Stand-ins in ``folder`` for the files of ``owner``'s tree, which are saved as ``files``.

    ``in_memory`` are the paths of named memory.
    """

    folder: Path
    owner: Owner
    files: SavedFiles
    in_memory: Collection[str]
    _made: dict[bytes, bytes] = field(default_factory=dict)

    def instead_of(self, path: bytes, number: int, mode: int, size: int) -> bytes:
        """Return the path of the stand-in for the file of this number. CRIU makes those of deleted
        files itself. Raises :class:`OutOfSpace`.
        """
        if path not in self._made:
            made = self.folder / str(len(self._made))
            self._made[path] = os.fsencode(made)
            if number not in self.files.deleted:
                fifo = number in self.files.pipes
                try:
                    _make(made, self.owner, mode, size, fifo=fifo)
                except (OSError, OverflowError) as error:  # the user's CRIU wrote that size
                    raise OutOfSpace(
                        f"no file like {os.fsdecode(path)} can be made for the rehearsal: {error}",
                        hint=f"make room in {self.folder.parent.parent}",
                    ) from error
        return self._made[path]


def _make(path: Path, owner: Owner, mode: int, size: int, *, fifo: bool) -> None:
    """Make a file without content, and give it to the owner."""
    wanted = stat.S_IMODE(mode) or 0o600
    if fifo:
        os.mkfifo(path, 0o600)
        os.chown(path, owner.uid, owner.gid)
        path.chmod(wanted)
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.fchown(descriptor, owner.uid, owner.gid)
        os.fchmod(descriptor, wanted)
    finally:
        os.close(descriptor)
