#!/usr/bin/env python3
"""Give periodic checkpoints to each of your programs that has none: for a timer, or for cron.

    protect.py --every 30min --keep 3

Only programs with phosd's hook (`phos run`) get them: others would stand still for long. An
administrator does the same for all users with [[periodic]] tables in phosd.toml
(docs/operate/recipes.md).

It needs Python's own library and `phos`. Exit code 0: all have periodic checkpoints; 1: one could
not be saved, which phosd tries again.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


def ancestors(pid: int) -> set[int]:
    """Return the processes above a process: a checkpoint of one has its children."""
    above: set[int] = set()
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended
            break
        pid = int(status.rpartition(")")[2].split()[1])
        above.add(pid)
    return above


def unprotected() -> list[int]:
    """Return your programs that have no periodic checkpoints."""
    done = subprocess.run(["phos", "ps", "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the programs cannot be listed: {done.stdout.strip()}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    mine = {row["pid"]: row for row in rows if row["user"] == os.geteuid()}
    return [
        pid
        for pid, row in mine.items()
        if row["hook"] == "hooked"
        and row["state"] != "suspended"
        and row["checkpoint_interval"] is None
        and not mine.keys() & ancestors(pid)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", default="30min", metavar="60s|5min|2h")
    parser.add_argument("--keep", type=int, default=3)
    given = parser.parse_args()
    options = ["--every", given.every, "--keep", str(given.keep), "--queue"]
    codes = [
        subprocess.run(["phos", "checkpoint", str(pid), *options]).returncode
        for pid in unprotected()
    ]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
