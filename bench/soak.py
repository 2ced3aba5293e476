"""Run thousands of short jobs against one phosd on the software GPU, and watch for growth.

    python -m bench.soak [--jobs 10000] [--checkpoint-every 20] [--folder DIR]

Starts a bus, phosd and two small programs. One client submits jobs that verify images, and at every
``--checkpoint-every``-th job a checkpoint; another client keeps listing the processes. Prints one
JSON object: resources of phosd and its children after each tenth of the jobs, bytes of the history,
and latencies of ``ListProcesses``. It shows whether anything grows. The times are no measure of
performance: the GPU is software, and the machine may be busy.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phosd.bus import ROOT, CallError, Connection, Signal
from phosd.engine.system.native import hook_library, softgpu_folder

_MANAGER = "org.phos.Manager1"
_JOB = "org.phos.Job1"
_PROGRAM = Path(__file__).parent / "programs" / "small.py"
_PROGRAMS = 2
KEPT = 4
"""Images that retention keeps."""
_LIST_PAUSE = 0.2
_PATIENCE = 120.0
_PARTS = 10


@dataclass(frozen=True)
class Sample:
    """Resources of phosd and its descendants after ``jobs`` jobs. Sizes are in bytes."""

    jobs: int
    resident: int
    children_resident: int
    descriptors: int
    children_descriptors: int
    threads: int
    children: int
    history: int
    history_rows: int
    images: int


@dataclass
class Result:
    """Result of a run. Times are in seconds."""

    jobs: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    list_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def list_percentile(self, share: float) -> float:
        """Return the latency within which this share (0..1) of the lists was answered."""
        times = sorted(self.list_seconds)
        return times[min(len(times) - 1, int(share * len(times)))]

    def report(self) -> dict[str, Any]:
        """Return the result for a line of JSON."""
        return {
            "case": "soak",
            "jobs": dict(self.jobs),
            "failures": self.failures[:10],
            "seconds": round(self.seconds, 1),
            "lists": len(self.list_seconds),
            "list_p50_s": round(self.list_percentile(0.5), 4),
            "list_p99_s": round(self.list_percentile(0.99), 4),
            "list_max_s": round(max(self.list_seconds), 4),
            "samples": [asdict(sample) for sample in self.samples],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="instead of a temporary one, which is removed")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="phos-soak-"))
        )
        result = soak(folder, options.jobs, options.checkpoint_every)
    print(json.dumps(result.report()))


def soak(folder: Path, jobs: int, checkpoint_every: int) -> Result:
    """Run this many jobs. ``folder`` takes everything that phosd stores."""
    with _bus() as address, _phosd(folder, address) as daemon, _programs(folder) as programs:
        return asyncio.run(_soak(address, daemon, programs, folder, jobs, checkpoint_every))


async def _soak(
    address: str, daemon: int, programs: list[int], folder: Path, jobs: int, checkpoint_every: int
) -> Result:
    result = Result()
    began = time.monotonic()
    async with _client(address) as client, _client(address) as watcher:
        ends = Ends()
        await client.subscribe(ends.hear, f"type='signal',interface='{_MANAGER}'")
        images: list[str] = []
        for pid in programs:
            images += await _checkpoint(client, ends, pid, result)
        watching = asyncio.create_task(_watch(watcher, result))
        for number in range(jobs - len(programs)):
            if number % max(1, jobs // _PARTS) == 0:
                result.samples.append(_sample(daemon, folder, sum(result.jobs.values())))
            pid = programs[number // checkpoint_every % len(programs)]
            if number % checkpoint_every == checkpoint_every - 1:
                images = [*images, *await _checkpoint(client, ends, pid, result)][-2:]
            else:
                await _run(client, ends, result, "VerifyImage", "sa{sv}", images[number % 2], {})
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        result.samples.append(_sample(daemon, folder, sum(result.jobs.values())))
    result.seconds = time.monotonic() - began
    return result


class Ends:
    """Collects the ends of jobs, even of a job whose path is not known yet."""

    def __init__(self) -> None:
        self._ended: dict[str, str] = {}
        self._news = asyncio.Event()

    def hear(self, heard: Signal) -> None:
        if heard.member == "JobRemoved":
            self._ended[heard.args[0]] = heard.args[1]
            self._news.set()

    async def wait(self, job: str) -> str:
        """Return the state in which a job ended, waiting for it."""
        while job not in self._ended:
            self._news.clear()
            async with asyncio.timeout(_PATIENCE):
                await self._news.wait()
        return self._ended.pop(job)


async def _checkpoint(client: Connection, ends: Ends, pid: int, result: Result) -> list[str]:
    """Checkpoint a process; return a list with the image, empty after a failure."""
    job = await _run(client, ends, result, "Checkpoint", "ua{sv}", pid, {})
    properties = "org.freedesktop.DBus.Properties"
    (image,) = await client.call(job, properties, "Get", "ss", _JOB, "Result")
    return [image] if image else []


async def _run(
    client: Connection, ends: Ends, result: Result, member: str, signature: str, *args: Any
) -> str:
    """Run a job to its end; return its path."""
    (job,) = await client.call(ROOT, _MANAGER, member, signature, *args)
    state = await ends.wait(job)
    result.jobs[member] += 1
    if state != "done":
        result.failures.append(f"{member} {args[0]}: {state}")
    return str(job)


async def _watch(client: Connection, result: Result) -> None:
    while True:
        began = time.monotonic()
        await client.call(ROOT, _MANAGER, "ListProcesses")
        result.list_seconds.append(time.monotonic() - began)
        await asyncio.sleep(_LIST_PAUSE)


def _sample(daemon: int, folder: Path, jobs: int) -> Sample:
    children = _below(daemon)
    database = folder / "state" / "history.db"
    rows = subprocess.run(
        [sys.executable, "-c", _COUNT, str(database)], capture_output=True, text=True, check=True
    )
    return Sample(
        jobs=jobs,
        resident=_resident(daemon),
        children_resident=sum(map(_resident, children)),
        descriptors=_entries(daemon, "fd"),
        children_descriptors=sum(_entries(pid, "fd") for pid in children),
        threads=_entries(daemon, "task"),
        children=len(children),
        history=sum(path.stat().st_size for path in folder.glob("state/history.db*")),
        history_rows=int(rows.stdout),
        images=sum(1 for _ in folder.glob("state/images/*/manifest.json")),
    )


_COUNT = (
    "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
    "tables = [r[0] for r in db.execute(\"select name from sqlite_master where type = 'table'\")]; "
    "print(sum(db.execute(f'select count(*) from [{t}]').fetchone()[0] for t in tables))"
)


def _below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += [int(child), *_below(int(child))]
    return found


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status[1]) * os.sysconf("SC_PAGE_SIZE") if status else 0


def _entries(pid: int, folder: str) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/{folder}").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return 0


@contextlib.asynccontextmanager
async def _client(address: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(address)
    with contextlib.closing(connection):
        yield connection


@contextlib.contextmanager
def _bus() -> Iterator[str]:
    with _ended(
        subprocess.Popen(
            ["dbus-daemon", "--session", "--nofork", "--nopidfile", "--print-address"],
            stdout=subprocess.PIPE,
            text=True,
        )
    ) as daemon:
        assert daemon.stdout is not None
        yield daemon.stdout.readline().strip()


@contextlib.contextmanager
def _phosd(folder: Path, address: str) -> Iterator[int]:
    config = folder / "phosd.toml"
    config.write_text(f"[[limits]]\nkeep = {KEPT}\n")
    command = [sys.executable, "-m", "phosd.service.main", "--session", f"--config={config}"]
    command += [f"--state-dir={folder / 'state'}", f"--runtime-dir={folder / 'run'}"]
    environment = os.environ | {"DBUS_SESSION_BUS_ADDRESS": address, "PHOS_GPU": "soft"}
    log = folder / "phosd.log"
    with (
        log.open("wb") as errors,
        _ended(subprocess.Popen(command, env=environment, stderr=errors)) as daemon,
    ):
        deadline = time.monotonic() + _PATIENCE
        while b"serves org.phos" not in log.read_bytes():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"phosd did not start: {log.read_text()}")
            time.sleep(0.1)
        yield daemon.pid


@contextlib.contextmanager
def _programs(folder: Path) -> Iterator[list[int]]:
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(softgpu_folder()),
        "LD_PRELOAD": str(hook_library()),
        "PHOS_RUNTIME_DIR": str(folder / "run"),
    }
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(_PROGRAMS):
            log = folder / f"program-{number}.log"
            output = stack.enter_context(log.open("ab"))
            program = subprocess.Popen(
                [sys.executable, str(_PROGRAM)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            found.append(stack.enter_context(_ended(program, signal.SIGKILL)).pid)
            deadline = time.monotonic() + _PATIENCE
            while log.read_bytes().count(b"\n") < 2:
                if program.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the program did not start: {log.read_text()}")
                time.sleep(0.1)
        yield found


@contextlib.contextmanager
def _ended(
    process: "subprocess.Popen[Any]", how: signal.Signals = signal.SIGTERM
) -> "Iterator[subprocess.Popen[Any]]":
    """Terminate the process at the end of the block, and wait for it."""
    with process:
        try:
            yield process
        finally:
            process.send_signal(how)
            process.wait(_PATIENCE)


if __name__ == "__main__":
    try:
        main()
    except CallError as error:
        sys.exit(f"{error.name}: {error}")
