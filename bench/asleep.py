"""Measure how soon a program answers that sleeps until it is called.

    python -m bench.asleep [--count N] [--memory-tier SIZE] [--state DIR] -- answering [--size SIZE]

The program is put to sleep (`phos suspend --idle 1`) and called each time when it sleeps. ``s`` is
from the call, a TCP connection of a client that knows nothing of phosd, to the whole answer;
``awake_s`` is that of the program when it does not sleep. All answers have to be the same. Prints a
JSON object.
"""

import argparse
import socket
import time
from pathlib import Path
from typing import Any

from bench.one_program import parser, run
from bench.stage import Failed, Phos, wait_until, words_of
from bench.starts import spread

_SECONDS = 60.0
_AWAKE = 10


def asked(port: int) -> tuple[float, str]:
    """Return the seconds until the answer, and the answer."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), _SECONDS) as caller:
        caller.sendall(b"?\n")
        answer = caller.makefile().readline()
    return time.monotonic() - began, answer.strip()


def port_of(output: Path) -> int:
    """Return where a program listens, once it does."""

    def told() -> list[str] | None:
        words = output.read_text().split()
        return words if words[:1] == ["listens"] else None

    return int(wait_until(told, "the program to listen")[1])


def case(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything with one program."""
    settings = f'memory_tier = "{arguments.memory_tier}"\n'
    with Phos(folder, folder / "state", settings) as phos:
        pid, output = phos.run(words_of(arguments.program))
        port = port_of(output)
        answers = [asked(port) for _ in range(_AWAKE)]

        def row() -> dict[str, Any]:
            return next(row for row in phos.do("ps") if row["pid"] == pid)

        size = row()["device_bytes"]
        phos.do("suspend", str(pid), "--idle", "1")
        slept = []
        for _ in range(arguments.count):
            wait_until(lambda: row()["hollow"], "it to sleep")
            slept.append(asked(port))
        if len({answer for _, answer in (*answers, *slept)}) != 1:
            raise Failed("the answers differ")
    return {
        "asleep": " ".join(arguments.program),
        "device_bytes": size,
        "answers_equal": len(slept),
        "awake_s": spread([seconds for seconds, _ in answers]),
        "s": spread([seconds for seconds, _ in slept]),
        "each_s": sorted(round(seconds, 4) for seconds, _ in slept),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--count", type=int, default=12)
    run(made, case)


if __name__ == "__main__":
    main()
