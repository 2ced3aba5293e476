"""Writes each step to an SQLite database (its second argument) that it keeps open."""

import sqlite3
import sys

from gpu import Device, Report, State


def main() -> None:
    report = Report()
    state = State(Device(), cold_block=64 << 10)
    database = sqlite3.connect(sys.argv[2])
    database.execute("create table if not exists steps (number integer primary key, value blob)")
    for step in report.steps():
        computed = state.step(step, report.seed)
        with database:
            database.execute("insert or replace into steps values (?, ?)", (step, computed))
        report.tell(step, computed)


if __name__ == "__main__":
    main()
