"""Save, kill and restore somebody else's program through the daemon, and note what became of it.

    python -m bench.matrix NAME [--results FILE] [--seconds 60] [--checkpoints 2]
    python -m bench.matrix --list
    python -m bench.matrix --table > docs/compatibility.md

The program runs under ``phos run`` for at least ``--seconds``. It is saved ``--checkpoints`` times,
killed with its whole process tree, restored from the last image, and must print again what it had
printed after that. If it does not, it is compared with how far two undisturbed runs are apart. The
result is a line of JSON in FILE, in the place of an earlier one of the same commit; a name that has
one is not run again unless ``--again`` is given.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.checkpoint import Training, gone, kill_tree, wait_until
from bench.entries import ENTRIES, Entry
from bench.series import PROGRAMS, interpreter
from bench.stage import Phos, Refused
from phosd.engine.program.tree import scan
from phosd.errors import NoSuchProcess

_ROOT = Path(__file__).parents[1]
_BENCHMARKS = _ROOT / "docs/benchmarks"
_RESULTS = {
    "one H200": _BENCHMARKS / "h200-matrix.jsonl",
    "two H100s with NVLink": _BENCHMARKS / "h100-several-gpus.jsonl",
}
"""The files of the page, by the GPUs that the programs had."""


_PATIENCE = 300.0
"""Seconds that a command of ``phos`` may take."""
_MOST_SAID = 160
"""Characters of a refusal that the page shows; the results have all."""
_COMMAND_LINE = re.compile(r" \(/[^)]*\)")
"""What a message says after a pid, which names folders of the machine."""


class Ended(Exception):
    """The program has ended; with what it said last."""


class Started(Training):
    """A program that ``phos run`` has started."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log

    def wait_for(self, more: int) -> None:
        """Wait until ``more`` further lines are printed. Raises :class:`Ended`."""
        goal = self.lines() + more
        wait_until(lambda: self.lines() >= goal or gone((self.pid,)), "lines", self.log)
        if self.lines() < goal:
            said = self.log.with_name("stderr")
            raise Ended((said if said.exists() else self.log).read_text()[-1000:])

    def end(self) -> None:
        """Kill its whole tree, and wait until the pids are free."""
        try:
            tree = kill_tree(self.pid)
        except NoSuchProcess:
            return
        wait_until(lambda: gone(tree), "the pids to be free", self.log)


def tried(entry: Entry, phos: Phos, seconds: float, checkpoints: int) -> dict[str, Any]:
    """Run the program, save, kill and restore it; return what was seen."""
    pid, log = phos.run(_words(entry), dict(entry.environment))
    training = Started(pid, log)
    seen: dict[str, Any] = {"saved": []}
    try:
        began = time.monotonic()
        training.wait_for(entry.compare)
        for number in range(checkpoints):
            job = phos.do("checkpoint", str(pid))[-1]
            seen["saved"].append(_figures(job))
            training.wait_for(entry.compare)
            if number < checkpoints - 1:
                phos.do("rm", job["result"])
        while time.monotonic() - began < seconds:
            time.sleep(0.1)
        original = training.losses()
        seen["processes"] = len(scan(pid).pids)
        training.end()
        at = training.lines()
        restored = phos.do("restore", job["result"])[-1]
        seen["restore_s"] = round(sum(p["seconds"] for p in restored["phases"]), 3)
        training.wait_for(entry.compare)
        continued = training.losses(at)
        common = original.keys() & continued.keys()
        seen["compared"] = len(common)
        seen["apart"] = _apart(original, continued)
        phos.do("rm", job["result"])
    finally:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            training.end()
    if seen["apart"]:
        seen["undisturbed_apart"] = _undisturbed(entry, phos, max(common))
    return seen


def _reason(said: str) -> str:
    """Return the message of the error object that a command has printed last."""
    with contextlib.suppress(ValueError, KeyError):
        said = str(json.loads(said.splitlines()[-1])["message"])
    return _COMMAND_LINE.sub("", said)


def _words(entry: Entry) -> list[str]:
    if entry.program.endswith(".cu"):
        return [str(_compiled(PROGRAMS / entry.program)), *entry.words]
    program = [str(PROGRAMS / f"{entry.program}.py"), *entry.words]
    return [*interpreter(entry.gpus if entry.torchrun else 0), *program]


def _compiled(source: Path) -> Path:
    target = Path(tempfile.gettempdir()) / f"phos-{source.stem}"
    if not target.exists():
        flags = ["-O2", "-rdc=true", "-arch=native", "--extended-lambda", "-std=c++17"]
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


def _undisturbed(entry: Entry, phos: Phos, count: int) -> float:
    """Return how far two runs that nobody saves are apart in ``count`` steps."""
    started = [Started(*phos.run(_words(entry), dict(entry.environment))) for _ in range(2)]
    try:
        for training in started:
            training.wait_for(count)
        return _apart(*(training.losses() for training in started))
    finally:
        for training in started:
            training.end()


def verdict(result: dict[str, Any]) -> str:
    """Return ``restored``, or how it failed."""
    if "refused" in result:
        return "refused"
    if "ended" in result:
        return "ended"
    if not result.get("compared"):
        return "failed"
    return "restored" if result["apart"] <= result.get("undisturbed_apart", 0.0) else "differs"


def _versions(entry: Entry) -> dict[str, str]:
    found = {}
    for name in entry.packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@contextlib.contextmanager
def _phos() -> Iterator[Phos]:
    with tempfile.TemporaryDirectory(prefix="phos-matrix-") as folder:
        state = Path("/dev/shm", Path(folder).name)
        try:
            with Phos(Path(folder), state, patience=_PATIENCE) as phos:
                yield phos
        finally:
            shutil.rmtree(state, ignore_errors=True)


def _read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    return {(each["name"], each["commit"]): each for each in lines}


def _commit() -> str:
    words = ["git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("PHOS_COMMIT", "unknown")


def page() -> str:
    """Return the page: the latest result of each entry, by GPUs."""
    found = {
        gpus: {name: each for (name, _), each in _read(file).items()}
        for gpus, file in _RESULTS.items()
    }
    tried = {name for latest in found.values() for name in latest}
    lines = [_HEAD.format(count=len(tried))]
    for gpus, latest in found.items():
        name = _RESULTS[gpus].name
        lines += ["", f"## On {gpus}", "", f"[The results](benchmarks/{name}).", "", _COLUMNS]
        lines += [_row(entry, latest[name]) for name, entry in ENTRIES.items() if name in latest]
    missing = [entry.title for name, entry in ENTRIES.items() if name not in tried]
    if missing:
        lines += ["", f"Without a result yet: {'; '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _row(entry: Entry, result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    found = verdict(result)
    if found == "restored" and result["apart"]:
        found = "restored; as far apart as two undisturbed runs"
    elif found == "refused":
        said = " ".join(result["refused"].split())
        found = f"refused: {said[:_MOST_SAID]}{'...' if len(said) > _MOST_SAID else ''}"
        found += f" **Remedy:** {entry.remedy}" if entry.remedy else ""
    cells = [entry.title, versions, found]
    if saved := result.get("saved"):
        last = saved[-1]
        cells += [
            f"{last['device_bytes'] / 1e9:.1f} GB",
            str(result.get("processes", "")),
            f"{last['prepare_s']:.2f} s",
            f"{last['stop_s']:.2f} s",
            f"{result['restore_s']:.1f} s" if "restore_s" in result else "",
        ]
    else:
        cells += [""] * 5
    return f"| {' | '.join(cells)} |"


_HEAD = """# Programs that were tried

Made by `python -m bench.matrix --table`. Each of these {count} programs ran under `phos run`
(driver 580.159), was saved while it computed, killed with its whole process tree, and restored.
The values that it printed after the last checkpoint and again after the restore were compared,
and are equal unless the table says otherwise. Images in memory. Up to 13 programs ran at a time
on the H200, so the times are those of a busy GPU and busy processors
([benchmarks](benchmarks.md) has others); those with two GPUs ran one at a time. The programs
are in `bench/programs`."""

_COLUMNS = """\
| program | versions | result | device memory | processes | prepare | stop | restore |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(ENTRIES))
    parser.add_argument("--results", type=Path, default=next(iter(_RESULTS.values())))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--checkpoints", type=int, default=2)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or arguments.table:
        print("\n".join(ENTRIES) + "\n" if arguments.list else page(), end="")
        return
    if arguments.name is None:
        parser.error("name a program; --list shows them")
    entry, commit = ENTRIES[arguments.name], _commit()
    results = _read(arguments.results)
    if (arguments.name, commit) in results and not arguments.again:
        return
    result: dict[str, Any] = {"name": arguments.name, "commit": commit}
    result["versions"] = _versions(entry)
    with _phos() as phos:
        try:
            result |= tried(entry, phos, arguments.seconds, arguments.checkpoints)
        except Refused as error:
            result["refused"] = _reason(str(error))
        except Ended as error:
            result["ended"] = str(error)
    results[arguments.name, commit] = result
    arguments.results.write_text("".join(json.dumps(each) + "\n" for each in results.values()))
    print(json.dumps(result), flush=True)
    sys.exit(verdict(result) != "restored")


if __name__ == "__main__":
    main()
