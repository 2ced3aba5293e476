"""Set the stage for a benchmark of everything together: a bus, a phosd, and waits that end.

Whoever waits here for something gives up after :data:`PATIENCE` seconds.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from bench.checkpoint import gone, kill_tree
from phosd.cli.run_command.environment import do_without_what_cannot_be_saved, prepend
from phosd.demo.stage import BUS_CONFIG
from phosd.engine.system import cuda, memory_mount
from phosd.engine.system.native import python_environment

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE = 120.0
KEPT = 3
"""Images at a time."""
_LOOK_SECONDS = 0.01
_LAST_BYTES = 3000
_END_SECONDS = 20.0

T = TypeVar("T")


class Failed(Exception):
    """What must happen has not happened; the text says what."""


class Refused(Failed):
    """phosd refused, with its own words."""


def wait_until(condition: Callable[[], T | None], what: str) -> T:
    """Return the first true value of ``condition``. Raises :class:`Failed`, naming ``what``."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Failed(f"waited {PATIENCE:.0f} s in vain for {what}")
        time.sleep(_LOOK_SECONDS)
    return value


def end_tree(pid: int) -> None:
    """Kill a program with its process tree, and wait until its pids are free."""
    tree = kill_tree(pid)
    wait_until(lambda: gone(tree), "the pids to be free")


class Step(NamedTuple):
    """A step that a program has printed, with its value in hexadecimal.

    A restored program's monotonic clock has not run on meanwhile, so the times that it prints are
    not those of others.
    """

    number: int
    value: str


@dataclass(frozen=True)
class Shown:
    """What a program has printed, as it grows."""

    file: Path

    def lines(self, since: int = 0) -> list[list[str]]:
        """Return the words of each whole line, but for the first ``since`` ones."""
        text = self.file.read_text() if self.file.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()[since:]]

    def steps(self, since: int = 0) -> list[Step]:
        """Return the steps from line ``since`` on."""
        return [
            Step(int(words[0]), words[1])
            for words in self.lines(since)
            if len(words) == 4 and words[0].isdigit()
        ]

    def told(self, which: str, since: int = 0) -> list[list[str]]:
        """Return the other lines that begin with a word (``bench/programs/own.py``), without it."""
        return [words[1:] for words in self.lines(since) if words[:1] == [which]]

    def follow(self, over: Callable[[], bool], what: str) -> None:
        """Wait until something is ``over``, as long as the program prints.

        Raises :class:`Failed`, naming ``what``, when nothing has come for too long.
        """
        size, deadline = -1, 0.0
        while not over():
            now = time.monotonic()
            if (grown := self.file.stat().st_size) != size:
                size, deadline = grown, now + PATIENCE
            elif now > deadline:
                raise Failed(f"waited for {what}; for {PATIENCE:.0f} s nothing was printed")
            time.sleep(_LOOK_SECONDS)


def words_of(program: Sequence[str], *more: str) -> list[str]:
    """Return the words that run one of ``bench/programs``, with its arguments and ``more``."""
    path = PROGRAMS / f"{program[0]}.py"
    if not path.is_file():
        raise Failed(f"there is no program {path}; give the name of one of {PROGRAMS}")
    return [sys.executable, str(path), *program[1:], *more]


def start_undisturbed(words: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
    """Start a program without the hook and without phosd."""
    environment = python_environment()
    do_without_what_cannot_be_saved(environment)
    if cuda.is_software():
        prepend(environment, "LD_LIBRARY_PATH", cuda.software_gpu())
    with output.open("wb") as out:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )


def undisturbed(words: Sequence[str], output: Path) -> list[Step]:
    """Run a program to its end, without the hook and without phosd; return its steps."""
    process = start_undisturbed(words, output)
    shown = Shown(output)
    try:
        shown.follow(lambda: process.poll() is not None, "the undisturbed run")
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise Failed(f"undisturbed, the program ended with {process.returncode}")
    return shown.steps()


class Phos:
    """The command line, and a phosd on a bus of its own, with ``settings`` as in ``phosd.toml``.
    A command may take ``patience`` seconds. phosd is started by the words ``apart``, if any, and
    commands by those that ``join`` returns for phosd's pid.
    """

    def __init__(
        self,
        folder: Path,
        state: Path,
        settings: str = "",
        *,
        patience: float = PATIENCE,
        apart: Sequence[str] = (),
        join: Callable[[int], Sequence[str]] = lambda _: (),
    ) -> None:
        self._patience = patience
        self._runtime, self._log = folder / "run", folder / "phosd.log"
        bus, configuration, config = folder / "bus", folder / "bus.conf", folder / "phosd.toml"
        configuration.write_text(BUS_CONFIG.format(socket=bus))
        config.write_text(settings)
        self.environment = python_environment() | {
            "PHOS_BUS": f"unix:path={bus}",
            "PHOS_RUNTIME_DIR": str(self._runtime),
            "XDG_STATE_HOME": str(folder / "home"),
        }
        self._words = [
            ["dbus-daemon", f"--config-file={configuration}", "--nofork", "--nopidfile"],
            [
                *apart,
                *(sys.executable, "-m", "phosd.service.main", "--session", f"--config={config}"),
                *(f"--state-dir={state}", f"--runtime-dir={self._runtime}"),
            ],
        ]
        self._bus = bus
        self.daemon = 0
        """phosd's pid, once it serves."""
        self._join = join
        self._joined: Sequence[str] = ()
        self._ready = (bus.exists, lambda: b"serves org.phos" in self._log.read_bytes())
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as starting:
            starting.callback(self._free_memory)
            for left in (self._bus, self._log):  # by an earlier one in the folder
                left.unlink(missing_ok=True)
            for words, ready in zip(self._words, self._ready, strict=True):
                pid = starting.enter_context(self._running(words))
                wait_until(ready, f"{words[0]} to be ready")
            self.daemon = pid
            self._joined = self._join(pid)
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, *words: str) -> list[str]:
        """Return the words of a command of ``phos``, to be run in :attr:`environment`."""
        return [*self._joined, sys.executable, "-m", "phosd.cli.main", *words]

    def do(self, *words: str) -> list[dict[str, Any]]:
        """Run a command; return its objects. Raises :class:`Refused` if it fails."""
        done = self._call(*words)
        if done.returncode:
            raise Refused((done.stderr.strip() or done.stdout.strip())[-1500:])
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def run(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> tuple[int, Path]:
        """Start a program; return its pid and the file of its output."""
        done = self._call("run", "--detach", "--", *words, **(environment or {}))
        if done.returncode:
            raise Refused(done.stderr.strip())
        started = json.loads(done.stdout)
        return int(started["pid"]), Path(started["stdout"])

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints of the history that have an image, newest first."""
        rows = self.do("history", "--operation", "checkpoint", "--state", "done", "--limit", "1000")
        return [row for row in rows if row.get("result")]

    def job_of(self, image: str) -> dict[str, Any]:
        """Return the checkpoint that has made an image, from the history."""
        return wait_until(
            lambda: next((row for row in self.checkpoints() if row["result"] == image), None),
            f"image {image} in the history",
        )

    @contextlib.contextmanager
    def _running(self, words: Sequence[str]) -> Iterator[int]:
        bus = {"DBUS_SESSION_BUS_ADDRESS": self.environment["PHOS_BUS"]}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                env=python_environment() | bus,
                start_new_session=True,
            )
        try:
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _free_memory(self) -> None:
        """Unmount what a phosd that was killed has left of images in memory."""
        if (memory := self._runtime / "memory").is_mount():
            memory_mount.unmount(memory)

    def _call(self, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        try:
            return subprocess.run(
                self.command("--json", *words),
                capture_output=True,
                text=True,
                env=self.environment | environment,
                timeout=self._patience,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = f"`phos {' '.join(words)}` took longer than {self._patience:.0f} s"
            raise Failed(said) from error


def figures(job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a job of the history: of the stop, of writing, and of each phase."""
    phases: dict[str, float] = {}
    for phase in job["phases"]:
        phases[phase["name"]] = phases.get(phase["name"], 0.0) + phase["seconds"]
    return {
        "mode": job["mode"],
        "stop_s": round(job["stop_seconds"], 3),
        "persist_s": round(sum(phases.get(name, 0.0) for name in ("persist", "write")), 3),
        "phases_s": {name: round(seconds, 3) for name, seconds in phases.items()},
    }


def last_words(folder: Path) -> str:
    """Return the end of each log and output below a folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        wanted = path.suffix in (".log", ".out", ".err") or path.name in ("stdout", "stderr")
        if wanted and path.is_file() and (text := path.read_text(errors="replace")):
            found.append(f"==> {path.relative_to(folder)} <==\n{text[-_LAST_BYTES:].strip()}")
    return "\n".join(found)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what such a bench has to be told."""
    parser.add_argument("--state", type=Path, default=Path("/var/tmp"), help="where images go")
    parser.add_argument("--memory-tier", default="25%", help="as in phosd.toml")
    parser.add_argument("program", nargs="+", metavar="PROGRAM [ARGUMENTS]")


def run(
    measure: Callable[[argparse.Namespace, Path, dict[str, Any]], None],
    arguments: argparse.Namespace,
    report: dict[str, Any],
) -> NoReturn:
    """Let ``measure`` fill the report, print that, and exit with 1 if it failed."""
    report |= {"program": " ".join(arguments.program), "memory_tier": arguments.memory_tier}
    with judged(arguments.state, report) as folder:
        measure(arguments, folder, report)
    print(json.dumps(report), flush=True)
    sys.exit(1 if "failed" in report else 0)


@contextlib.contextmanager
def judged(state: Path, report: dict[str, Any]) -> Iterator[Path]:
    """Yield a folder of its own below ``state``. What fails there is noted in the report, as
    ``failed``, and the end of each log is printed on the standard error.
    """
    with tempfile.TemporaryDirectory(
        prefix="phos-bench-", dir=state, ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        try:
            yield folder
        except BaseException as error:
            print(last_words(folder), file=sys.stderr, flush=True)
            if not isinstance(error, Failed):
                raise
            report["failed"] = str(error)
