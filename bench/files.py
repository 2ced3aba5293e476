"""Measure what a program's files add to its stop, and how long they take to come back.

    python -m bench.files [--count N] [--state DIR] [--cases NAME,NAME]

``bench/programs/writing.py`` runs without and with files that it has open to read and write: 100 or
1,000 of 64 KiB that nothing changes; one of 1 GiB, unchanged, or of which 1 % changes between two
checkpoints, also mapped. It is saved ``--count`` times, the first time apart. In the last case, one
file of 4 GiB, it is then killed, the file is changed, wholly or 1 % of it, and comes back with the
program. The files are in the same file system as the images. Prints one JSON object for each case.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.series import one, phases, start
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.system.mounts import kind_at

_SETTLE = 10
"""Steps before the first checkpoint, and between two."""
_PAGE = 4096


class Case(NamedTuple):
    """The words of the program, and which parts of each file are changed before restores."""

    words: tuple[str, ...]
    changed: tuple[float, ...] = ()


def _files(count: int, mib: int, *more: str) -> tuple[str, ...]:
    return ("--files", str(count), "--mib", str(mib), *more)


_PAGES = str(26)
"""One percent of 1 GiB in 100 steps."""
CASES: Mapping[str, Case] = {
    "none": Case(_files(0, 0)),
    "100": Case(_files(100, 6)),
    "1000": Case(_files(1000, 62)),
    "large": Case(_files(1, 1024)),
    "written": Case(_files(1, 1024, "--changed", _PAGES)),
    "mapped": Case(_files(1, 1024, "--changed", _PAGES, "--mapped")),
    "back": Case(_files(1, 4096), (1.0, 0.01)),
}


def change(folder: Path, part: float) -> None:
    """Overwrite a ``part`` of each file's pages."""
    chance = random.Random(2)
    for path in folder.iterdir():
        with path.open("r+b", buffering=0) as file:
            pages = path.stat().st_size // _PAGE
            for at in chance.sample(range(pages), int(part * pages)):
                file.seek(at * _PAGE)
                file.write(chance.randbytes(_PAGE))


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def without_versions(folder: Path) -> int:
    """Delete what a restore has left beside the files; return how many there were."""
    left = [path for path in folder.iterdir() if ".phos-" in path.name]
    for path in left:
        path.unlink()
    return len(left)


def measured(case: Case, folder: Path, count: int) -> dict[str, Any]:
    config = NodeConfig(folder / "state", folder / "run")
    kept = folder / "files"
    kept.mkdir()
    with Node(config) as node:
        node.movers.mover(0)
        training = start(
            folder / "output", config.runtime_dir, "writing", str(kept), *case.words, hooked=True
        )
        training.wait_for(_SETTLE)
        rows, image = [], ""
        for _ in range(count):
            rows.append(one(node, training, CheckpointOptions(), 100))
            if "error" in rows[-1]:
                raise SystemExit(rows[-1]["error"])
            if image:
                node.store.delete(image)
            image = rows[-1]["image"]
        before = training.losses()
        answer: dict[str, Any] = {
            "file_system": kind_at(os.getpid(), str(kept)),
            "first_stop_s": round(rows[0]["stop_s"], 4),
            "stop_s": [round(row["stop_s"], 4) for row in rows[1:]],
            "stop_median_s": round(statistics.median(row["stop_s"] for row in rows[1:]), 4),
            "phases_s": rows[-1]["phases_s"],
        }
        restores = []
        for part in case.changed:
            training.kill()
            saved = digests(kept)
            change(kept, part)
            at, progress = training.lines(), Progress()
            result = restore(node, image, RestoreOptions(), progress)
            training.wait_for(_SETTLE)
            after = training.losses(at)
            common = before.keys() & after.keys()
            left = without_versions(kept)
            restores.append(
                {
                    "changed": part,
                    "restore_s": round(result.seconds, 3),
                    "phases_s": phases(progress),
                    "left": left,
                    "files_equal": digests(kept) == saved,
                    "values_equal": bool(common) and all(before[n] == after[n] for n in common),
                }
            )
        training.kill()
        node.store.delete(image)
    return answer | ({"restores": restores} if restores else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=6, help="checkpoints (%(default)s)")
    parser.add_argument("--state", type=Path, default=Path("/var/tmp"), help="folder for all")
    parser.add_argument("--cases", default=",".join(CASES), help="%(default)s")
    arguments = parser.parse_args()
    for name in arguments.cases.split(","):
        with tempfile.TemporaryDirectory(prefix="phos-bench-", dir=arguments.state) as folder:
            found = measured(CASES[name], Path(folder), arguments.count)
        print(json.dumps({"files": name, **found}), flush=True)


if __name__ == "__main__":
    main()
