"""Steps on the GPU, each noted in files of many kinds, in the folder after the number of steps.
What was noted before is looked at in each step.

A database of sqlite with a write-ahead log and a reader, a table whose end is overwritten by what
is added, as in parquet files, an array that is mapped, a temporary file without a name, a log, and
folders that are made under another name and renamed, as checkpoints of training are. With
``strict`` after the folder also some that must not be there before, as of orbax, and a link to the
last of them.
"""

import hashlib
import mmap
import os
import shutil
import sqlite3
import struct
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from gpu import Device, Report, State

ROW = 4096
ROWS = 512
EVERY = 10
"""Steps after which a folder is made."""
KEPT = 2
FOOTER = struct.Struct("<8sQ32s")


def row(step: int) -> bytes:
    return hashlib.sha256(b"%d" % step).digest() * (ROW // 32)


class Book(Protocol):
    """A file that each step is noted in."""

    def note(self, step: int) -> None: ...


class Database:
    def __init__(self, path: Path) -> None:
        self._writer = sqlite3.connect(path, isolation_level=None)
        self._writer.execute("pragma journal_mode = wal")
        self._writer.execute("create table steps (step integer, value blob)")
        self._reader = sqlite3.connect(path, isolation_level=None)

    def note(self, step: int) -> None:
        if step % 3 == 0:
            self._reader.execute("begin")
        (seen,) = self._reader.execute("select count(*) from steps").fetchone()
        # In a transaction the reader sees what there was when it began.
        assert seen == step - step % 3, f"the database has {seen} rows at {step}"
        self._writer.execute("insert into steps values (?, ?)", (step, row(step)))
        if step % 3 == 2:
            self._reader.execute("commit")


class Table:
    """Rows, and after them a footer that says how many, with a digest of all; it goes with each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._digest = b""
        self._end(0)

    def _end(self, rows: int) -> None:
        self._digest = hashlib.sha256(self._digest + row(rows)).digest()
        self._file.write(FOOTER.pack(b"rows", rows, self._digest))

    def note(self, step: int) -> None:
        self._file.seek(-FOOTER.size, os.SEEK_END)
        _, rows, digest = FOOTER.unpack(self._file.read(FOOTER.size))
        assert (rows, digest) == (step, self._digest), f"the table has {rows} rows at {step}"
        self._file.seek(-FOOTER.size, os.SEEK_END)
        self._file.write(row(step))
        self._end(step + 1)


class Array:
    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(ROW * ROWS)
            self._mapped = mmap.mmap(file.fileno(), ROW * ROWS)

    def note(self, step: int) -> None:
        at, after = step % ROWS * ROW, (step + 1) % ROWS * ROW
        before = (step - 1) % ROWS * ROW
        if step:
            assert self._mapped[before : before + ROW] == row(step - 1), f"the array at {step}"
        last = row(step + 1 - ROWS) if step + 1 >= ROWS else bytes(ROW)
        assert self._mapped[after : after + ROW] == last, f"the array is ahead at {step}"
        self._mapped[at : at + ROW] = row(step)


class Scratch:
    def __init__(self, folder: Path) -> None:
        descriptor, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
        self._file = os.fdopen(descriptor, "w+b", buffering=0)

    def note(self, step: int) -> None:
        self._file.seek(0)
        assert int(self._file.read() or 0) == step, f"the temporary file at {step}"
        self._file.seek(0)
        self._file.write(b"%d" % (step + 1))


class Saved:
    """A folder every few steps, of which the last ones are kept; it is being written meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, step: int) -> None:
        number, part = divmod(step, EVERY)
        made = self._folder / f"step-{number}.tmp"
        if part == 0:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            self._file = (made / "weights").open("w+b", buffering=0)
        assert self._file.seek(0, os.SEEK_END) == part * ROW, f"the folder at {step}"
        self._file.write(row(step))
        if part == EVERY - 1:
            self._file.close()
            final = self._folder / f"step-{number}"
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
            shutil.rmtree(self._folder / f"step-{number - KEPT}", ignore_errors=True)


class Strict:
    """A folder every few steps, of which the last ones are kept, and a link to the newest. What is
    there already, or is missing when it is to be removed, ends the program.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "strict"
        self._folder.mkdir()

    def note(self, step: int) -> None:
        number, part = divmod(step, EVERY)
        if part:
            return
        made, latest = self._folder / str(number), self._folder / "latest"
        made.mkdir()
        (made / "weights").write_bytes(row(step))
        if number:
            assert str(latest.readlink()) == str(number - 1), f"the newest at {step}"
            latest.unlink()
        latest.symlink_to(str(number))
        if number >= KEPT:
            shutil.rmtree(self._folder / str(number - KEPT))


def main() -> None:
    folder = Path(sys.argv[2])
    report = Report()
    state = State(Device())
    books: list[Book] = [
        Database(folder / "database.sqlite"),
        Table(folder / "table"),
        Array(folder / "array"),
        Scratch(folder),
        Saved(folder),
        *([Strict(folder)] if sys.argv[3:] == ["strict"] else []),
    ]
    log = (folder / "log").open("ab", buffering=0)
    for step in report.steps():
        value = state.step(step, report.seed)
        for book in books:
            book.note(step)
        log.write(b"%d\n" % step)
        report.tell(step, value)


if __name__ == "__main__":
    main()
