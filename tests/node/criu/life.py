"""One program's life in these tests: started, dumped, killed, restored, and what it said."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from phosd.engine.criu.dump import dump as criu_dump
from phosd.engine.criu.dump.dump import DumpOptions, TreeDump
from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.restore import admission
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restore import Restored
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.restore.tree_files import TreeFiles
from phosd.engine.criu.run.owned_processes import is_criu
from phosd.engine.criu.run.program import Criu
from phosd.engine.image.manifest import Process, Tree
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.progress import Progress
from phosd.engine.program import tree
from phosd.engine.system import procfs

SYSTEM_PYTHON = "/usr/bin/python3"
"""A Python that every user may execute (the one that runs the tests may lie below /root)."""

USER = 54321
"""A user without an entry in the password file."""

COUNTER = """
import time
value = 0
while True:
    value += 1
    print(f"{value}\\n", end="", flush=True)  # by one write(2): it may be killed after each
    time.sleep(0.005)
"""

HOLDER = """
import fcntl, mmap, os, socket, sys
def hold(kind):
    if kind in ("TCP", "UDP"):
        made = socket.socket(type=socket.SOCK_STREAM if kind == "TCP" else socket.SOCK_DGRAM)
        made.bind(("127.0.0.1", 0))
        if kind == "TCP":
            made.listen()
    elif kind == "connection":
        listening = socket.create_server(("127.0.0.1", 0))
        made = socket.create_connection(listening.getsockname()), listening.accept()
        listening.close()
    elif kind in ("@abstract", "path"):
        made = socket.socket(socket.AF_UNIX)
        made.bind("\\0" + os.getcwd() if kind[0] == "@" else os.getcwd() + "/socket")
        made.listen()
    elif kind in ("flock", "lockf"):
        open(kind, "w").close()
        made = open(kind, "r+" if kind == "lockf" else "r")
        getattr(fcntl, kind)(made, fcntl.LOCK_EX)
    elif kind == "fifo":
        os.mkfifo(kind)
        made = os.open(kind, os.O_RDWR)
    else:
        file = os.open("/dev/shm/" + os.path.basename(os.getcwd()), os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, mmap.PAGESIZE)
        made = mmap.mmap(file, mmap.PAGESIZE)
    return made
held = [hold(kind) for kind in sys.argv[1:]]
"""
"""Holds what its arguments say, and counts."""

T = TypeVar("T")


def wait_for(look: Callable[[], T], patience: float = 60.0) -> T:
    """What ``look`` returns as soon as it is true."""
    end = time.monotonic() + patience
    while not (found := look()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return found


def _runs(pid: int) -> bool:
    """Whether a process neither stands still nor has ended."""
    found = procfs.stat(pid)
    return found is not None and not found.stopped and not found.dead


def records(found: tree.ProcessTree) -> list[Process]:
    """The manifest's entries for the processes of a tree."""
    return [process.record(0) for process in found]


@dataclass
class Life:
    """A program of user ``uid``, whose output goes to ``home/log`` unless told otherwise.

    ``home`` belongs to the user; ``private`` to root alone.
    """

    criu: Criu
    home: Path
    private: Path
    uid: int = 0
    started: subprocess.Popen[bytes] | None = None
    dumped: TreeDump | None = None
    record: Tree | None = None
    restored: list[Restored] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.home / "log"

    @property
    def images(self) -> Path:
        return self.private / "images"

    @property
    def saved_tree(self) -> SavedTree:
        """Its dump, as a restore finds it."""
        assert self.dumped is not None
        assert self.record is not None
        return SavedTree(self.record, records(self.dumped.tree), self.images)

    @property
    def pid(self) -> int:
        assert self.started is not None
        return self.started.pid

    def start(self, source: str, *words: str, **popen: Any) -> int:
        """Start a Python program; returns its pid."""
        script = self.home / "program.py"
        script.write_text(source)
        popen.setdefault("stdin", subprocess.DEVNULL)
        popen.setdefault("stderr", subprocess.DEVNULL)
        popen.setdefault("start_new_session", True)
        with contextlib.ExitStack() as opened:
            if "stdout" not in popen:
                descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                opened.callback(os.close, descriptor)
                os.fchown(descriptor, self.uid, self.uid)
                popen["stdout"] = descriptor
            self.started = subprocess.Popen(
                [SYSTEM_PYTHON, "-S", str(script), *words],
                cwd=self.home,
                user=self.uid,
                group=self.uid,
                extra_groups=[],
                **popen,
            )
        return self.started.pid

    def values(self, path: Path | None = None) -> list[int]:
        """The numbers in the log, complete lines only."""
        text = (path or self.log).read_text()
        # A dump may fall between a number and the end of its line.
        lines = (line for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return [int(line) for line in lines if line.strip()]

    def counts_on(self, path: Path | None = None, by: int = 5) -> list[int]:
        """Wait until ``by`` more numbers are in the log; returns all."""
        target = path or self.log
        before = len(self.values(target)) if target.exists() else 0
        wait_for(lambda: target.exists() and len(self.values(target)) >= before + by)
        return self.values(target)

    def told(self, files: Policy = Policy.ROLLBACK) -> tuple[str, ...]:
        """What a restore would do with its files, in words."""
        with TreeFiles(self.saved_tree, files) as found:
            found.require_as_saved()
            return found.told

    def dump(self, progress: Progress | None = None, **options: Any) -> TreeDump:
        """Dump it; it goes on."""
        self.images.mkdir()
        found = tree.scan(self.pid)
        self.dumped = criu_dump.dump_tree(
            self.criu, found, self.images, DumpOptions(**options), progress
        )
        self.record = self.dumped.record("images")
        return self.dumped

    def kill(self) -> None:
        """SIGKILL to the whole tree, which stands still: none sees the end of another."""
        assert self.dumped is not None
        pids = self.dumped.tree.pids
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                wait_for(lambda: not any(map(_runs, pids)))
        assert self.started is not None
        self.started.wait()
        # This, too, may fall between a number and the end of its line.
        if self.log.exists() and not self.log.read_text().endswith("\n"):
            with self.log.open("a") as log:
                log.write("\n")

    def admit(self, cancellation: Cancellation | None = None, **options: Any) -> None:
        """Only look whether it could be restored."""
        admission.admission(self.criu, self.saved_tree, TreeRestoreOptions(**options), cancellation)

    def restore(self, **options: Any) -> Restored:
        """Admit it and bring it back."""
        self.admit(**options)
        restored = criu_restore.restore_tree(
            self.criu, self.saved_tree, TreeRestoreOptions(**options)
        )
        self.restored.append(restored)
        return restored

    def again(self, **options: Any) -> Restored:
        """The usual: dumped, killed, restored."""
        self.dump(**options)
        self.kill()
        return self.restore()

    def end(self) -> None:
        """Leave nothing behind."""
        if self.started is not None and self.started.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.started.pid, signal.SIGKILL)
            self.started.kill()
            self.started.wait()
        for restored in self.restored:
            for pid in restored.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class CriuKiller(Cancellation):
    """Kills every CRIU that it finds when it is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[int] = []

    def check(self) -> None:
        for pid in filter(is_criu, procfs.pids()):
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)


def in_order(values: Sequence[int]) -> bool:
    """Whether a counter's log misses nothing and repeats nothing but what a restore went back.

    Fails by itself where it does not: a log is too long for the message of an assertion.
    """
    steps = enumerate(pairwise(values))
    missed = [(at, a, b) for at, (a, b) in steps if b != a + 1 and b > a]
    assert not missed, f"(line, value, next): {missed[:5]}; the last is {values[-1]}"
    return True
