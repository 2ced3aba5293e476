"""Record the pools of this node, and the programs of each."""

from collections.abc import Iterable
from typing import Any

from phosd.engine.system.procfs import ProcessId, boot_id
from phosd.service.history.database import Database, storable
from phosd.service.jobs.pool import Member, Pool


class PoolRecords:
    """The pools in the history's ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, pool: Pool, programs: Iterable[Member]) -> None:
        """Record a pool as it is now, with its programs."""
        boot = boot_id()
        rows = [
            {
                "pool": pool.name,
                "boot_id": boot,
                **each.process._asdict(),
                "suspension": each.suspension,
            }
            for each in programs
        ]

        def run(db: Any) -> None:
            with db.atomic():
                db["pools"].upsert(storable(pool.row()), pk="name")
                db.execute("delete from pool_programs where pool = ?", [pool.name])
                db["pool_programs"].upsert_all(rows, pk=("boot_id", "pid", "start_time"))

        self._database.record(run)

    def forget(self, name: str) -> None:
        """Delete a pool."""

        def run(db: Any) -> None:
            with db.atomic():
                db.execute("delete from pools where name = ?", [name])
                db.execute("delete from pool_programs where pool = ?", [name])

        self._database.record(run)

    def all(self) -> list[tuple[Pool, list[Member]]]:
        """Return the pools, each with those of its programs that are of this boot."""
        rows = self._database.recall(
            "select * from pool_programs where boot_id = ? order by rowid",
            [boot_id()],
        )
        programs: dict[str, list[Member]] = {}
        for row in rows:
            found = programs.setdefault(row["pool"], [])
            process = ProcessId(row["pid"], row["start_time"])
            found.append(Member(process, row["suspension"] or ""))
        pools = map(Pool.of_row, self._database.recall("select * from pools order by name"))
        return [(pool, programs.get(pool.name, [])) for pool in pools]
