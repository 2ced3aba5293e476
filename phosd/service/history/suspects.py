"""Remember suspects: kernels that ran when a prediction of writes was wrong."""

import time
from collections.abc import Iterable
from typing import Any

from phosd.engine.job.checkpoint_history import KernelMark
from phosd.service.history.database import Database, Row, storable
from phosd.service.process_identity import Program

_MOST = 4096
"""Most kernels remembered per program; the latest found are kept."""


class Suspects:
    """The suspects, keyed by user, executable, module and name. Writes are queued in order."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def found(self, program: Program, kernels: Iterable[KernelMark]) -> None:
        """Record kernels as suspects: one of them wrote memory that was not predicted."""
        now = time.time()
        owner = _owner(program)
        keys = [owner | _kernel(kernel) for kernel in kernels]

        def run(db: Any) -> None:
            with db.atomic():
                for key in keys:
                    db.execute(
                        "insert into kernels (uid, executable, module, name, state, guessed_wrong, "
                        "first_seen, last_seen) values (:uid, :executable, :module, :name, "
                        "'suspect', 1, :now, :now) on conflict do update set state = 'suspect', "
                        "guessed_wrong = guessed_wrong + 1, last_seen = :now",
                        key | {"now": now},
                    )
                db.execute(
                    "delete from kernels where uid = :uid and executable = :executable and rowid "
                    "not in (select rowid from kernels where uid = :uid and "
                    "executable = :executable order by last_seen desc limit :most)",
                    owner | {"most": _MOST},
                )

        self._database.record(run)

    def trust(self, program: Program, kernels: Iterable[KernelMark]) -> None:
        """Clear kernels of a program until a wrong prediction makes them suspects again."""
        keys = [_owner(program) | _kernel(kernel) for kernel in kernels]

        def run(db: Any) -> None:
            with db.atomic():
                for key in keys:
                    db.execute(
                        "delete from kernels where uid = :uid and executable = :executable "
                        "and module = :module and name = :name",
                        key,
                    )

        self._database.record(run)

    def of(self, program: Program) -> tuple[KernelMark, ...]:
        """Return the suspects of a program, latest found first."""
        rows = self._database.recall(
            "select module, name from kernels where uid = :uid and executable = :executable "
            "and state = 'suspect' order by last_seen desc",
            _owner(program),
        )
        return tuple(KernelMark(row["name"], int(row["module"], 16)) for row in rows)


def _owner(program: Program) -> Row:
    return storable({"uid": program.uid, "executable": program.executable})


def _kernel(kernel: KernelMark) -> Row:
    return storable({"module": f"{kernel.module:016x}", "name": kernel.name})
