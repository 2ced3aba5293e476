"""The kernels of a program of which one has written where nobody expected."""

import time
from collections.abc import Iterable
from typing import Any

from phosd.engine.job.experience import KernelMark
from phosd.service.history.database import Database, Row, storable
from phosd.service.process_identity import Program

_MOST = 4096
"""Kernels of one program that are remembered, those found last."""


class Suspects:
    """Remembered by user, executable, module and name. Written later, in order."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def found(self, program: Program, kernels: Iterable[KernelMark]) -> None:
        """One of these kernels of a program has written where nobody expected."""
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
        """These kernels of a program are no suspects, until they are found to be again."""
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
        """The suspects of a program, those found last first."""
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
