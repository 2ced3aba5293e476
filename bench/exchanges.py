"""Measure exchanges of programs that take turns on a GPU, one of which computes at a time.

    python -m bench.exchanges [--programs N] [--count N] [--memory-tier SIZE] [--state DIR]
        -- answering [--size SIZE]

So many programs are started, one after the other, and suspended hollow. An exchange
(`phos swap --hollow`, over D-Bus) brings another one, chosen at random, in the place of the one
that runs; then it is asked over TCP. ``swap_s`` is from the call until its job has ended,
``answer_s`` from the question to the whole answer, and ``phosd_bytes`` the memory that phosd has at
first, and then every 25 exchanges. All answers have to be the same. Prints a JSON object.
"""

import argparse
import random
from pathlib import Path
from time import monotonic
from typing import Any

from bench.asleep import asked, port_of
from bench.one_program import parser, run
from bench.stage import Failed, Phos, words_of
from bench.starts import spread
from phosd.client import Client

_SEED = 1
_BETWEEN = 25
"""Exchanges between two looks at how much memory phosd has."""


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def case(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything with one kind of program."""
    chosen = random.Random(_SEED)
    settings = f'memory_tier = "{arguments.memory_tier}"\n'
    with Phos(folder, folder / "state", settings) as phos:
        ports: dict[int, int] = {}
        answers = set()
        for _ in range(arguments.programs):
            pid, output = phos.run(words_of(arguments.program))
            ports[pid] = port_of(output)
            answers.add(asked(ports[pid])[1])
            phos.do("suspend", str(pid), "--hollow")
        (answer,) = answers
        running, *_ = ports
        phos.do("resume", str(running))
        size = sum(row["device_bytes"] for row in phos.do("ps"))
        grown = [resident(phos.daemon)]
        swaps, asks = [], []
        with Client(phos.environment["PHOS_BUS"]) as client:
            for number in range(arguments.count):
                coming = chosen.choice([pid for pid in ports if pid != running])
                began = monotonic()
                client.swap(running, coming, hollow=True).wait()
                swaps.append(monotonic() - began)
                running = coming
                took, told = asked(ports[running])
                asks.append(took)
                if told != answer:
                    raise Failed(f"exchange {number}: {told} instead of {answer}")
                if number % _BETWEEN == _BETWEEN - 1:
                    grown.append(resident(phos.daemon))
    return {
        "exchanges": " ".join(arguments.program),
        "programs": arguments.programs,
        "count": arguments.count,
        "device_bytes_of_one": size,
        "phosd_bytes": grown,
        "swap_s": spread(swaps),
        "answer_s": spread(asks),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--programs", type=int, default=6)
    made.add_argument("--count", type=int, default=300)
    run(made, case)


if __name__ == "__main__":
    main()
