"""Record the programs that sleep until somebody calls them."""

import logging
from typing import Any

import msgspec

from phosd.engine.system.procfs import ProcessId, boot_id
from phosd.service.history.database import Database, storable
from phosd.service.jobs.sleeper import Sleeper

_KEY = ("boot_id", "pid", "start_time")
_log = logging.getLogger(__name__)


class SleeperRecords:
    """The sleepers in the history's ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, sleeper: Sleeper) -> None:
        """Record a sleeper as it is now."""
        row = storable(sleeper.row())
        self._database.record(lambda db: db["sleepers"].upsert(row, pk=_KEY))

    def forget(self, process: ProcessId) -> None:
        """Delete a sleeper, and those of earlier boots."""

        def run(db: Any) -> None:
            boot = boot_id()
            words = "delete from sleepers where boot_id != ? or (pid = ? and start_time = ?)"
            db.execute(words, [boot, *process])

        self._database.record(run)

    def all(self) -> list[Sleeper]:
        """Return the sleepers of this boot, without those that another version has written."""
        found: list[Sleeper] = []
        for row in self._database.recall("select * from sleepers where boot_id = ?", [boot_id()]):
            try:
                found.append(Sleeper.of_row(row))
            except msgspec.DecodeError as error:
                _log.error("what wakes process %s cannot be read: %s", row["pid"], error)
        return found
