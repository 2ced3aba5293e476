"""Write one file for each unfinished job, before the job touches anything.

The journal is not in the database, which can be full, read-only or corrupt. A file that exists when
phosd starts belongs to a job that an earlier phosd did not finish.
"""

import logging
import os
from pathlib import Path

import msgspec

from phosd import __version__
from phosd.engine.job.affected import AffectedSet
from phosd.errors import Internal

_MAX_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class JobRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record of a job for the phosd that finds it unfinished. ``started``: seconds since the epoch.

    ``affected`` is written before the job touches the first process; files call it ``concern``.
    """

    job: int
    operation: str
    target: str
    owner: int
    started: float
    boot_id: str
    pid: int | None = None
    start_time: int | None = None
    affected: AffectedSet | None = msgspec.field(default=None, name="concern")
    token: str = ""
    """The word by which the caller knows the job again; empty: none."""
    phosd: str = __version__
    """The version of phosd that ran the job; of a file without one, this one."""

    @property
    def pids(self) -> set[int]:
        """The pids of the processes that the job works on."""
        known = {self.pid} if self.pid is not None else set()
        return known | {each.pid for each in self.affected.processes} if self.affected else known


def read_records(folder: Path) -> list[JobRecord]:
    """Read the records of jobs in ``folder``; none if the folder does not exist."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            with path.open("rb") as file:
                found.append(msgspec.json.decode(file.read(_MAX_BYTES), type=JobRecord))
        except FileNotFoundError:
            continue  # the job has ended meanwhile
        except (OSError, msgspec.DecodeError) as error:
            _log.error(
                "%s is no journal entry of phosd %s or of one before it (%s); start the phosd that"
                " wrote it, or see to the programs that it names and remove it",
                path,
                __version__,
                error,
            )
    return found


class Journal:
    """The folder of journal files, mode 0700."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def write(self, record: JobRecord) -> None:
        """Write the record to disk, atomically and durably.

        Raises :class:`Internal` if it cannot be written: no job may begin without it.
        """
        path = self._path(record.job)
        temporary = path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(msgspec.json.encode(record))
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
        """Remove the record of a job that has ended."""
        self._path(job).unlink(missing_ok=True)
        self._sync_folder()

    def interrupted(self) -> list[JobRecord]:
        """Read the records that an earlier phosd left. Unreadable files are logged and kept.

        Call it before the first job: records that it was killed over writing are removed.
        """
        for unfinished in self._folder.glob("*.new"):
            unfinished.unlink()
        return read_records(self._folder)

    def _path(self, job: int) -> Path:
        return self._folder / f"{job}.json"

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
