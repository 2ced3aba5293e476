"""One file for each unfinished job, written before the job touches anything.

The journal is not in the database, which can be full, read-only or corrupt. A file that is still
there when phosd starts belongs to a job that phosd did not survive.
"""

import logging
import os
from pathlib import Path

import msgspec

from phosd.engine.job.affected import Concern
from phosd.errors import Internal

_MAX_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a job while it runs. ``started`` is in seconds since the epoch.

    ``concern`` comes before the job touches the first process.
    """

    job: int
    operation: str
    target: str
    owner: int
    started: float
    boot_id: str
    pid: int | None = None
    start_time: int | None = None
    concern: Concern | None = None

    @property
    def pids(self) -> set[int]:
        """The processes that the job works on."""
        known = {self.pid} if self.pid is not None else set()
        return known | {each.pid for each in self.concern.processes} if self.concern else known


def entries(folder: Path) -> list[Entry]:
    """The jobs that are written down in ``folder``, which may not be there."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            with path.open("rb") as file:
                found.append(msgspec.json.decode(file.read(_MAX_BYTES), type=Entry))
        except FileNotFoundError:
            continue  # the job has ended meanwhile
        except (OSError, msgspec.DecodeError) as error:
            _log.error("%s is no journal entry (%s); look at it and remove it", path, error)
    return found


class Journal:
    """The folder of journal files, mode 0700."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def write(self, entry: Entry) -> None:
        """Have the entry on disk when this returns, whole or not at all.

        Raises :class:`Internal` when it cannot be written: no job may begin without it.
        """
        path = self._path(entry.job)
        temporary = path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(msgspec.json.encode(entry))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            self._sync_folder()
        except OSError as error:
            raise Internal(
                f"the journal {path} cannot be written ({error.strerror}), so nothing was begun",
                hint="make room in its folder",
            ) from error

    def remove(self, job: int) -> None:
        """The job has ended."""
        self._path(job).unlink(missing_ok=True)
        self._sync_folder()

    def unfinished(self) -> list[Entry]:
        """The jobs that an earlier phosd left. A file that cannot be read is kept and logged."""
        return entries(self._folder)

    def _path(self, job: int) -> Path:
        return self._folder / f"{job}.json"

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
