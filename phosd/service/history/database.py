"""Write and read the history's SQLite file; trouble with it never stops a job.

One thread writes. Work that fails for now (the file is locked, the disk is full or gone) waits in
memory and is retried. An unusable file (damaged, lacking a table, of a newer version) is renamed,
and a new file is started.
"""

import collections
import functools
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlite_utils import Database as Tables

from phosd.errors import Internal
from phosd.service.history.schema import migrations

Row = dict[str, Any]
Work = Callable[[Any], None]
"""Work that writes into the tables."""

_BUSY_MILLISECONDS = 2_000
_AGAIN_SECONDS = 5.0
_BETWEEN_RENEWALS = 60.0
"""Least seconds between two renamings: on a disk that damages every file, one is enough."""
_MOST_ASIDE = 3
"""Renamed unusable files to keep for inspection."""
_MOST_WAITING = 4096
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_OF_THE_STATEMENT = {
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
}
_log = logging.getLogger(__name__)


def storable(row: Row) -> Row:
    """Return the row with its texts made valid UTF-8: file names and commands may hold any
    bytes.
    """
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }


class Database:
    """The history's file. ``record`` returns at once; reads see what has been written so far.

    ``observer`` is called in another thread when :attr:`trouble` has changed or an unusable file
    was replaced.
    """

    def __init__(
        self, path: Path, observer: Callable[[], None], again_seconds: float = _AGAIN_SECONDS
    ) -> None:
        self._path = path
        self._observer = observer
        self._again_seconds = again_seconds
        self.trouble = ""
        """Why the history cannot be written at the moment; empty while it can."""
        self.renewals = 0
        """How many unusable files were renamed."""
        self._tables: Any = None
        self._inode: tuple[int, int] | None = None
        self._not_before = 0.0
        self._renewed_at = -_BETWEEN_RENEWALS
        self._late: collections.deque[Work] = collections.deque(maxlen=_MOST_WAITING)
        self._queue: queue.SimpleQueue[Work | threading.Event | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._serve, name="history", daemon=True)
        self._writer.start()
        self.record(lambda tables: None)  # opens the file
        self.flush()

    def record(self, work: Work) -> None:
        """Queue work for writing, after all earlier work."""
        self._queue.put(work)

    def flush(self) -> None:
        """Wait until all earlier work is in the file, or has failed for now."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def query(self, sql: str, params: Any = ()) -> list[Row]:
        """Return the rows of a reading statement. Raises :class:`Internal` when the file cannot be
        read.
        """
        try:
            tables = _connect(self._path)
            try:
                return list(tables.query(sql, params))
            finally:
                tables.conn.close()
        except sqlite3.Error as error:
            if _code(error) in {*_DAMAGED, sqlite3.SQLITE_ERROR}:
                self.record(self._examine)
            raise Internal(
                f"the history {self._path} cannot be read ({error})",
                hint="jobs go on without it; phosd's log tells when it is back",
            ) from error

    def recall(self, sql: str, params: Any = ()) -> list[Row]:
        """Return the rows of a reading statement, or no rows when the file cannot be read."""
        try:
            return self.query(sql, params)
        except Internal as error:
            _log.info("%s", error)
            return []

    def close(self) -> None:
        """Write the remaining work if possible, and close the file."""
        self._queue.put(None)
        self._writer.join()

    def _serve(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=self._again_seconds if self._late else None)
            except queue.Empty:
                self._catch_up()
                continue
            if work is None:
                break
            if isinstance(work, threading.Event):
                self._catch_up()
                work.set()
                continue
            if len(self._late) == _MOST_WAITING:
                self._catch_up()  # the trouble may be over
            if len(self._late) == _MOST_WAITING:
                _log.warning("what was recorded first since the trouble began is lost")
            self._late.append(work)
            # Do not wait for an empty queue: under load it may never be empty.
            self._catch_up()
        self._not_before = 0.0
        self._catch_up()
        if self._late:
            _log.error("%d records of the history are lost (%s)", len(self._late), self.trouble)
        self._close()

    def _catch_up(self) -> None:
        """Write the waiting work in order, and stop at the first that cannot be written now."""
        if time.monotonic() < self._not_before:
            return
        while self._late:
            work = self._late[0]
            try:
                work(self._opened())
            except sqlite3.Error as error:
                if _code(error) in _OF_THE_STATEMENT:
                    self._give_up(work)
                elif not self._mended(error):
                    self._later(f"the history {self._path} cannot be written ({error})")
                    return
            except _Unusable as error:
                if not self._mended(error):
                    self._later(f"the history {self._path} {error}")
                    return
            except OSError as error:  # the folder is gone
                self._later(f"the history {self._path} cannot be reached ({error.strerror})")
                return
            except Exception:  # the thread must survive for later work
                self._give_up(work)
            else:
                self._late.popleft()
        self._tell("")

    def _give_up(self, work: Work) -> None:
        _log.exception("the history %s could not be written", self._path)
        self._late.popleft()
        self._close()  # which also rolls back what the statement began

    def _later(self, trouble: str) -> None:
        self._close()
        self._not_before = time.monotonic() + self._again_seconds
        self._tell(trouble)

    def _tell(self, trouble: str) -> None:
        if trouble == self.trouble:
            return
        if trouble:
            _log.error("%s; what happens meanwhile is written when it can be", trouble)
        else:
            _log.warning("the history %s is written again", self._path)
        self.trouble = trouble
        self._observer()

    def _opened(self) -> Any:
        """Return the tables of the file at the path, reopening it if another file has taken its
        place.
        """
        if self._tables is not None and self._inode != _inode(self._path):
            self._close()
        if self._tables is None:
            self._path.touch(mode=0o600)
            self._tables = _connect(self._path)
            _bring_up_to_date(self._tables)
            self._inode = _inode(self._path)
        return self._tables

    def _examine(self, _: Any) -> None:
        """Check a file that a reader found damaged. Raises :class:`_Unusable` if it is."""
        self._close()  # to drop its page cache
        (found,) = self._opened().execute("pragma quick_check(1)").fetchone()
        if found != "ok":
            raise _Unusable(f"is damaged ({found})")

    def _close(self) -> None:
        if self._tables is not None:
            self._tables.conn.close()
            self._tables = None

    def _mended(self, error: Exception) -> bool:
        """Rename an unusable file so that a new one is started. Returns whether that was done."""
        unusable = isinstance(error, _Unusable) or _code(error) in _DAMAGED
        if not unusable or time.monotonic() < self._renewed_at + _BETWEEN_RENEWALS:
            return False
        self._close()
        self._renewed_at = time.monotonic()
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns()}")
        for suffix in ("-wal", "-shm", ""):  # the old file's WAL must not apply to the new one
            part = Path(f"{self._path}{suffix}")
            if part.exists():
                part.rename(f"{aside}{suffix}")
        _log.error("the history was of no use (%s); it is kept as %s", error, aside)
        self._remove_old_ones()
        self.renewals += 1
        self._observer()
        return True

    def _remove_old_ones(self) -> None:
        """Delete all renamed files and their WALs but the latest few."""
        aside = self._path.parent.glob(f"{self._path.name}.damaged-*")
        ages = sorted({path.name.partition("-")[2].partition("-")[0] for path in aside})
        for age in ages[:-_MOST_ASIDE]:
            for path in self._path.parent.glob(f"{self._path.name}.damaged-{age}*"):
                try:
                    path.unlink()
                except OSError as error:
                    _log.warning("%s is not needed and stays: %s", path, error.strerror)


class _Unusable(Exception):
    """The file is a database, but this version of phosd cannot use it."""


def _connect(path: Path) -> Any:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, check_same_thread=False
    )
    connection.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
    connection.execute("PRAGMA foreign_keys=ON")
    return Tables(connection)


def _bring_up_to_date(tables: Any) -> None:
    """Apply the pending migrations. Raises :class:`_Unusable` when the tables then differ from
    those of this version.
    """
    known = {migration.name for migration in migrations.pending(Tables(memory=True))}
    newer = {migration.name for migration in migrations.applied(tables)} - known
    if newer:
        raise _Unusable(f"was made by a newer phosd ({', '.join(sorted(newer))})")
    tables.enable_wal()
    tables.execute("PRAGMA synchronous=FULL")
    migrations.apply(tables)
    for name, columns in _expected().items():
        missing = columns - _columns(tables, name)
        if missing:
            raise _Unusable(f"lacks {', '.join(sorted(missing))} of its table {name}")


@functools.cache
def _expected() -> Mapping[str, frozenset[str]]:
    """Return the columns of each table of this version."""
    tables = Tables(memory=True)
    migrations.apply(tables)
    found = {name: _columns(tables, name) for name in tables.table_names()}
    tables.conn.close()
    return found


def _columns(tables: Any, name: str) -> frozenset[str]:
    rows = tables.execute("select name from pragma_table_info(?)", [name]).fetchall()
    return frozenset(row[0] for row in rows)


def _code(error: Exception) -> int:
    """Return SQLite's primary result code of an error."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
