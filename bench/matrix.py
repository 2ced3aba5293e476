"""Save, kill and restore somebody else's program through the daemon, and note what became of it.

    python -m bench.matrix NAME [--results FILE] [--seconds 60] [--path FOLDER]
    python -m bench.matrix --list

The program runs under ``phos run`` for at least ``--seconds``. It is saved twice, killed with its
whole process tree, restored from the last image, and must print again what it had printed after
that. If it does not, it is compared with how far two undisturbed runs are apart. Some programs are
suspended and resumed, or saved, a hundred times instead; what they and phosd hold must stay the
same. The result is a line of JSON in FILE, in the place of an earlier one of the same commit; a
name that has one is not run again unless ``--again`` is given. ``--path`` has more packages for the
program, as ``PYTHONPATH``.

A program is not run where what it needs is not there: that is told ("not here: needs ..."), with
exit code 2, and is no result. ``python packaging/make_pages.py`` writes the page of all results.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.checkpoint import PATIENCE, Training, gone, kill_tree, wait_until
from bench.entries import ENTRIES, Entry
from bench.series import PROGRAMS, interpreter
from bench.stage import Phos, Refused
from bench.use import Use, of_tree
from phosd.engine.program.tree import scan
from phosd.engine.system import cuda
from phosd.errors import NoSuchProcess

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "docs/benchmarks/programs.jsonl"
_PATIENCE = 300.0
"""Seconds that a command of ``phos`` may take."""
_FEW = 2
"""Checkpoints whose figures the result has; with more, it has what is held, too."""
_START_PATIENCE = 900.0
"""Seconds that a program may take to its first lines: servers load models, and compile."""
_NOT_HERE = "not here: "
"""What a program begins its last line with, if the machine lacks what it needs."""
_COMMAND_LINE = re.compile(r" \(/[^)]*\)")
"""What a message says after a pid, which names folders of the machine."""


class Ended(Exception):
    """The program has ended; with what it said last."""


class NotHere(Exception):
    """The machine lacks what the program needs; with what that is."""


class Started(Training):
    """A program that ``phos run`` has started."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log

    def wait_for(self, more: int) -> None:
        """Wait until ``more`` further lines are printed. Raises :class:`Ended`, and
        :class:`NotHere` if the program has ended for that.
        """
        goal = self.lines() + more
        patience = PATIENCE if self.lines() else _START_PATIENCE
        wait_until(lambda: self.lines() >= goal or gone((self.pid,)), "lines", self.log, patience)
        if self.lines() < goal:
            stderr = self.log.with_name("stderr")
            said = (stderr if stderr.exists() else self.log).read_text()
            for line in said.splitlines()[-1:]:
                if line.startswith(_NOT_HERE):
                    raise NotHere(line.removeprefix(_NOT_HERE))
            raise Ended(said[-1000:])

    def end(self) -> None:
        """Kill its whole tree, and wait until the pids are free."""
        try:
            tree = kill_tree(self.pid)
        except NoSuchProcess:
            return
        wait_until(lambda: gone(tree), "the pids to be free", self.log)


class Trial:
    """A program of the matrix, on this machine, with ``path`` as more of its packages."""

    def __init__(self, entry: Entry, phos: Phos, seconds: float, path: Sequence[str]) -> None:
        self._entry, self._phos, self._seconds, self._path = entry, phos, seconds, path

    def result(self) -> dict[str, Any]:
        """Run the program, save, kill and restore it; return what was seen."""
        entry, seen, began = self._entry, dict[str, Any](), time.monotonic()
        training = self._started()
        try:
            training.wait_for(entry.compare)
            if entry.suspensions:
                suspend = partial(self._suspend, training.pid)
                self._repeat(training, entry.suspensions, suspend, seen)
            image = self._save(training, seen)
            while time.monotonic() - began < self._seconds:
                time.sleep(0.1)
            original = training.losses()
            seen["processes"] = len(scan(training.pid).pids)
            training.end()
            at = training.lines()
            restored = self._phos.do("restore", image)[-1]
            seen["restore_s"] = round(sum(p["seconds"] for p in restored["phases"]), 3)
            training.wait_for(entry.compare)
            continued = training.losses(at)
            common = original.keys() & continued.keys()
            seen["compared"] = len(common)
            seen["apart"] = _apart(original, continued)
            self._phos.do("rm", image)
        finally:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                training.end()
        if seen["apart"]:
            seen["undisturbed_apart"] = self._undisturbed(max(common))
        return seen

    def _started(self) -> Started:
        words = words_of(self._entry)
        if self._path:
            path = os.pathsep.join([*self._path, self._phos.environment["PYTHONPATH"]])
            words = ["env", f"PYTHONPATH={path}", *words]
        return Started(*self._phos.run(words, dict(self._entry.environment)))

    def _save(self, training: Started, seen: dict[str, Any]) -> str:
        """Save the program as often as its entry says; return the last image."""
        jobs: list[dict[str, Any]] = []

        def save() -> None:
            if jobs:
                self._phos.do("rm", jobs[-1]["result"])
            jobs.append(self._phos.do("checkpoint", str(training.pid), *self._entry.options)[-1])

        if self._entry.checkpoints > _FEW:
            self._repeat(training, self._entry.checkpoints, save, seen)
            training.wait_for(self._entry.compare)
        else:
            for _ in range(self._entry.checkpoints):
                save()
                training.wait_for(self._entry.compare)
        seen["saved"] = [_figures(job) for job in jobs[-_FEW:]]
        return str(jobs[-1]["result"])

    def _suspend(self, pid: int) -> None:
        for what in ("suspend", "resume"):
            self._phos.do(what, str(pid))

    def _repeat(
        self, training: Started, count: int, act: Callable[[], None], seen: dict[str, Any]
    ) -> None:
        """Act again and again; note what has grown since a tenth of it."""
        held: list[dict[str, Use]] = []
        for number in range(1, count + 1):
            act()
            training.wait_for(1)
            if number in (count // 10, count):
                held.append({"program": of_tree(training.pid), "phosd": of_tree(self._phos.daemon)})
        early, late = held
        seen["repeated"] = count
        seen["held"] = [{who: asdict(use) for who, use in each.items()} for each in held]
        seen["grown"] = {who: late[who].grown(early[who]) for who in late}

    def _undisturbed(self, count: int) -> float:
        """Return how far two runs that nobody saves are apart in ``count`` steps."""
        started = [self._started() for _ in range(2)]
        try:
            for training in started:
                training.wait_for(count)
            return _apart(*(training.losses() for training in started))
        finally:
            for training in started:
                training.end()


def _reason(said: str) -> str:
    """Return the message of the error object that a command has printed last."""
    with contextlib.suppress(ValueError, KeyError):
        said = str(json.loads(said.splitlines()[-1])["message"])
    return _COMMAND_LINE.sub("", said)


def words_of(entry: Entry) -> list[str]:
    """Return the words that run an entry's program."""
    if entry.program.endswith(".cu"):
        return [str(_compiled(PROGRAMS / entry.program)), *entry.words]
    program = [str(PROGRAMS / f"{entry.program}.py"), *entry.words]
    return [*interpreter(entry.gpus if entry.torchrun else 0), *program]


def _compiled(source: Path) -> Path:
    target = Path(tempfile.gettempdir()) / f"phos-{source.stem}"
    if not target.exists():
        flags = ["-O2", "-rdc=true", "-arch=native", "--extended-lambda", "-std=c++20"]
        subprocess.run(["nvcc", *flags, "-o", target, source, "-lcublas"], check=True)
    return target


def _figures(job: dict[str, Any]) -> dict[str, Any]:
    phases = {p["name"]: round(p["seconds"], 3) for p in job["phases"]}
    return {
        "mode": job["mode"],
        "stop_s": round(job["stop_seconds"], 3),
        "prepare_s": phases["prepare"],
        "whole_s": round(sum(phases.values()), 3),
        "device_bytes": int(job["details"].get("snapshot_bytes", 0)),
    }


def _apart(one: dict[int, str], other: dict[int, str]) -> float:
    """Return how far values with the same number are apart, relative to their size, at most."""
    found = 0.0
    for number in one.keys() & other.keys():
        if one[number] != other[number]:
            a, b = float.fromhex(one[number]), float.fromhex(other[number])
            found = max(found, abs(a - b) / max(abs(a), abs(b)))
    return found


def verdict(result: Mapping[str, Any]) -> str:
    """Return ``restored``, or how it failed: ``grown`` means that it was restored, and that what
    the program or phosd holds has grown from job to job.
    """
    if "refused" in result:
        return "refused"
    if "ended" in result:
        return "ended"
    if not result.get("compared"):
        return "failed"
    if any(result.get("grown", {}).values()):
        return "grown"
    return "restored" if result["apart"] <= result.get("undisturbed_apart", 0.0) else "differs"


def _versions(entry: Entry, path: Sequence[str]) -> dict[str, str]:
    """Return the versions of the entry's packages that are here."""
    return {
        name: found.version
        for name in entry.packages
        for found in itertools.islice(metadata.distributions(name=name, path=[*path, *sys.path]), 1)
    }


def check_needs(entry: Entry, versions: Mapping[str, str]) -> None:
    """Raise :class:`NotHere` if the machine lacks what an entry needs."""
    lacking = [name for name in entry.packages if name not in versions]
    if entry.program.endswith(".cu") and shutil.which("nvcc") is None:
        lacking.append("nvcc")
    if (gpus := _gpus()) < entry.gpus:
        lacking.append(f"{entry.gpus} GPUs ({gpus} here)")
    if lacking:
        raise NotHere(f"needs {', '.join(lacking)}")


def _gpus() -> int:
    """Return how many GPUs programs see here; another process asks, which then leaves them."""
    ask = "from phosd.engine.system import cuda; print(cuda.call('cuDeviceGetCount'))"
    words = [sys.executable, "-c", ask]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def _machine() -> dict[str, str]:
    """Return the GPUs' name and the driver's version."""
    if cuda.is_software():
        return {"gpu": "software GPU"}
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    name, driver = done.stdout.splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver}


@contextlib.contextmanager
def _phos() -> Iterator[Phos]:
    with tempfile.TemporaryDirectory(prefix="phos-matrix-") as folder:
        state = Path("/dev/shm", Path(folder).name)
        try:
            with Phos(Path(folder), state, patience=_PATIENCE) as phos:
                yield phos
        finally:
            shutil.rmtree(state, ignore_errors=True)


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    return {(each["name"], each["commit"]): each for each in lines}


def _commit() -> str:
    words = ["git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("PHOS_COMMIT", "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(ENTRIES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--path", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ENTRIES))
        return
    if arguments.name is None:
        parser.error("name a program; --list shows them")
    entry, commit = ENTRIES[arguments.name], _commit()
    results = read(arguments.results)
    if (arguments.name, commit) in results and not arguments.again:
        return
    try:
        found = _result(entry, arguments.seconds, arguments.path)
    except NotHere as error:
        print(f"{arguments.name}: {_NOT_HERE}{error}", file=sys.stderr)
        sys.exit(2)
    result = {"name": arguments.name, "commit": commit, **found}
    results[arguments.name, commit] = result
    arguments.results.write_text("".join(json.dumps(each) + "\n" for each in results.values()))
    print(json.dumps(result), flush=True)
    sys.exit(verdict(result) != "restored")


def _result(entry: Entry, seconds: float, path: Sequence[str]) -> dict[str, Any]:
    """Try an entry. Raises :class:`NotHere`."""
    versions = _versions(entry, path)
    check_needs(entry, versions)
    result: dict[str, Any] = {"versions": versions, **_machine()}
    with _phos() as phos:
        try:
            result |= Trial(entry, phos, seconds, path).result()
        except Refused as error:
            result["refused"] = _reason(str(error))
        except Ended as error:
            result["ended"] = str(error)
    return result


if __name__ == "__main__":
    main()
