"""Measure CRIU's part of a restore of a program with much host memory and no GPU, as root.

    python -m bench.host_memory [--mib N] [--times N] [--threads N,N] [--folder DIR] [--cold]

The program is saved into DIR once, killed, and restored again and again: by CRIU alone, and with
each of these numbers of threads that put its large runs of pages back. ``--cold`` has its image
read from the disk each time. Prints one JSON object per row, with medians in seconds: until CRIU's
files are copied and CRIU can start (``copied``), until it holds all tasks (``made``), until the
threads have written all (``put_back``), and until the program runs (``seconds``).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.checkpoint import gone, wait_until
from phosd.engine.criu.dump import dump
from phosd.engine.criu.dump.dump import DumpOptions
from phosd.engine.criu.restore import parallel_pages, piece_copier
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restore import restore_tree
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.run.program import Criu
from phosd.engine.program import tree

PROGRAM = Path(__file__).parent / "programs/host_memory.py"
_LINES = 2
_NEVER = 1 << 62


def saved(criu: Criu, folder: Path, mib: int) -> SavedTree:
    """Save the program, and end it."""
    log = folder / "log"
    with log.open("ab") as out:
        program = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(mib)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    wait_until(lambda: log.read_bytes().count(b"\n") >= _LINES, "the program's memory", log)
    images = folder / "images"
    images.mkdir(mode=0o700)
    found = dump.dump_tree(criu, tree.scan(program.pid), images, DumpOptions())
    program.kill()
    program.wait()
    processes = [process.record(0) for process in found.tree]
    return SavedTree(found.record("images"), processes, images)


class Times:
    """When the steps of one restore were over."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.of: dict[str, float] = {}

    def note(self, step: str) -> None:
        """Only the first time counts."""
        self.of.setdefault(step, time.monotonic() - self.began)


def restored(criu: Criu, saved_tree: SavedTree, log: Path) -> dict[str, float]:
    """Restore the program once, see that it runs, and end it."""
    times = Times()
    complete, begun = (
        parallel_pages.ParallelPageLoader.made,
        parallel_pages.ParallelPageLoader.__init__,
    )

    def noting(self: parallel_pages.ParallelPageLoader) -> bool:
        times.note("made")
        done = complete(self)
        if done:
            times.note("put_back")
        return done

    def beginning(self: parallel_pages.ParallelPageLoader, *arguments: Any) -> None:
        times.note("copied")
        begun(self, *arguments)

    setattr(parallel_pages.ParallelPageLoader, "made", noting)  # noqa: B010 (mypy refuses the other)
    setattr(parallel_pages.ParallelPageLoader, "__init__", beginning)  # noqa: B010
    try:
        found = restore_tree(criu, saved_tree, TreeRestoreOptions())
    finally:
        setattr(parallel_pages.ParallelPageLoader, "made", complete)  # noqa: B010
        setattr(parallel_pages.ParallelPageLoader, "__init__", begun)  # noqa: B010
    times.note("seconds")
    before = log.read_bytes().count(b"\n")
    wait_until(lambda: log.read_bytes().count(b"\n") > before + 1, "its next lines", log)
    os.kill(found.pid, signal.SIGKILL)
    found.settle()
    wait_until(partial(gone, found.pids), "its end", log)
    return times.of


def forget(folder: Path) -> None:
    """Make the kernel drop what it has in memory of the files."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1350, help="of host memory (%(default)s)")
    parser.add_argument("--times", type=int, default=5, help="restores of each (%(default)s)")
    parser.add_argument("--threads", default="1,4,8,16", help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    criu = Criu.find()
    threads = [int(number) for number in arguments.threads.split(",")]
    least = parallel_pages._LEAST
    with tempfile.TemporaryDirectory(prefix="phos-bench-", dir=arguments.folder) as name:
        folder = Path(name)
        tree_saved = saved(criu, folder, arguments.mib)
        byte_count = sum(file.size for file in tree_saved.record.files)
        for count in (0, *threads):
            parallel_pages._LEAST = least if count else _NEVER
            piece_copier._MOST_THREADS = count
            rows = []
            for _ in range(arguments.times):
                if arguments.cold:
                    forget(tree_saved.folder)
                rows.append(restored(criu, tree_saved, folder / "log"))
            medians = {k: round(statistics.median(r[k] for r in rows), 3) for k in rows[0]}
            took = medians["put_back"] - medians["made"]
            row = {"host_bytes": byte_count, "threads": count or "CRIU", **medians}
            rate = {"put_back_gb_s": round(byte_count / took / 1e9, 1)} if count else {}
            print(json.dumps(row | rate), flush=True)


if __name__ == "__main__":
    main()
