"""Say which kernels real programs launch, and what the analysis knows of them.

    python -m bench.kernels collect FOLDER [--seconds S] [--architecture N] -- PROGRAM [ARGUMENTS]
    python -m bench.kernels verdicts FOLDER [--seconds S] [--state DIR] -- PROGRAM [ARGUMENTS]
    python -m bench.kernels twice FOLDER [--seconds S] [--instances K] -- PROGRAM [ARGUMENTS]
    python -m bench.kernels table FOLDER [--architecture N] [--patience S]
    python -m bench.kernels truth FOLDER [--architecture N] [--patience S]

``collect`` runs one of ``bench/programs`` under the hook, as root, and counts for some seconds what
it launches; it stores the counts, and the code of these kernels, in FOLDER. ``verdicts`` does the
same after it has had the kernels analysed, and prints one JSON object: how many launches may be run
again, may not, or are unknown, in all and by library, and what the hook's looks at them took. What
the analysis finds stays in DIR, as that of ``bench.series``; several programs may be run at a time.
``table`` analyses all that is in FOLDER, on any machine, a process for each kernel, and prints
Markdown: for each program and each library, the share of launches of kernels whose roles and ranges
are known, of those that may always be run again, of which a launch's parameters decide that, or
that never may, and why what is unknown is.

``twice`` runs a program without the hook on a real GPU, and the first K launches of each kernel and
grid a second time: was memory the same after both? ``truth`` compares that with the verdicts on the
same launches, by the hook's code and by the analysis in Python, on any machine: the table has, of
the instances that are idempotent in truth, those that got no such verdict (missed), and those that
got it wrongly, which are then listed; there must be none. What is idempotent by chance counts, too.
"""

import argparse
import json
import multiprocessing
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.launches import Launched, collect
from bench.rerun import twice
from bench.truth import truth
from bench.verdicts import verdicts
from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.idempotency import Idempotent, of_kernel
from phosd.engine.analysis.summary import Summary, summarise
from phosd.errors import PhosError

_AGAIN = (Idempotent.ALWAYS, Idempotent.DEPENDS, Idempotent.NEVER)


class Known(NamedTuple):
    """What the analysis knows of a kernel."""

    write_roles: bool
    roles: bool
    write_ranges: bool
    ranges: bool
    again: Idempotent
    decided: bool
    reasons: tuple[str, ...] = ()


def analysed(path: Path, name: str, architecture: int) -> Known:
    """Analyse a kernel of a file of code."""
    try:
        found = [known(one) for one in summarise(path.read_bytes(), architecture, [name])]
    except PhosError as error:
        return unknown(error.what)
    return found[0] if found else unknown("no code")


def known(summary: Summary) -> Known:
    """Return what a summary knows."""
    reads, writes = summary.unknown(Use.READ), summary.unknown(Use.WRITTEN)
    ranges = [summary.computed(use) for use in (Use.READ, Use.WRITTEN)]
    reasons = tuple(sorted(reads | writes))
    again = of_kernel(summary).idempotent
    return Known(not writes, not reasons, ranges[1], all(ranges), again, summary.decided(), reasons)


def unknown(why: str) -> Known:
    return Known(False, False, False, False, Idempotent.UNKNOWN, False, (why,))


def analysed_all(
    wanted: Mapping[str, set[str]], arguments: argparse.Namespace
) -> dict[tuple[str, str], Known]:
    """Analyse kernels by their files of code."""
    found: dict[tuple[str, str], Known] = {}
    # What takes too long is left; it ends with the pool.
    with multiprocessing.Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        begun = {
            (code, name): pool.apply_async(
                analysed, (arguments.folder / code, name, arguments.architecture)
            )
            for code, names in wanted.items()
            for name in sorted(names)
        }
        for kernel, result in begun.items():
            try:
                found[kernel] = result.get(arguments.patience)
            except multiprocessing.TimeoutError:
                found[kernel] = unknown("takes too long")
    return found


def table(arguments: argparse.Namespace) -> None:
    """Print the table of all that was collected."""
    programs = {
        path.stem: [Launched(*row) for row in json.loads(path.read_text())]
        for path in sorted(arguments.folder.glob("*.json"))
    }
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for rows in programs.values():
        for row in rows:
            if row.code:
                wanted[row.code].add(row.kernel)
    found = analysed_all(wanted, arguments)
    print(
        "| launched by | kernels | launches | roles: written, all, if a launch decides "
        "| ranges: written, all "
        "| again: always, depends, never |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    libraries: defaultdict[str, list[Launched]] = defaultdict(list)
    for name, rows in programs.items():
        print_row(name, rows, found)
        for row in rows:
            libraries[row.library].append(row)
    for name, rows in sorted(libraries.items()):
        print_row(f"all: {name}", rows, found)
    reasons: Counter[str] = Counter()
    for rows in programs.values():
        for row in rows:
            for why in found.get((row.code, row.kernel), unknown("no code")).reasons:
                reasons[why] += row.launches
    print("\n| unknown, because of | launches |\n| --- | ---: |")
    for why, count in reasons.most_common(20):
        print(f"| {why} | {count} |")


def print_row(name: str, rows: Sequence[Launched], found: Mapping[tuple[str, str], Known]) -> None:
    """Print the shares of launches of which something is known."""
    total = sum(row.launches for row in rows)
    shares = [0] * 8
    for row in rows:
        one = found.get((row.code, row.kernel), unknown(""))
        again = (one.again is kind for kind in _AGAIN)
        for at, yes in enumerate((*one[:2], one.roles or one.decided, *one[2:4], *again)):
            shares[at] += row.launches * bool(yes)
    percent = [f"{100 * share / total:.0f}%" for share in shares]
    kernels = len({(row.code, row.kernel) for row in rows})
    cells = " | ".join(", ".join(percent[a:b]) for a, b in ((0, 3), (3, 5), (5, 8)))
    print(f"| {name} | {kernels} | {total} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(required=True)
    programs = {"collect": collect, "verdicts": verdicts, "twice": twice}
    for name, do in (programs | {"table": table, "truth": truth}).items():
        one = what.add_parser(name)
        one.set_defaults(do=do)
        one.add_argument("folder", type=Path)
        one.add_argument("--architecture", type=int, default=90)
        if name not in programs:
            one.add_argument("--patience", type=float, default=60.0, help="seconds for a kernel")
            continue
        one.add_argument("program", nargs="+")
        if do is twice:
            one.add_argument("--seconds", type=float, default=90.0, help="that it may run")
            one.add_argument("--quiet", type=float, default=15.0, help="that end it earlier")
            one.add_argument("--instances", type=int, default=3, help="of a kernel and grid")
            help_of_percent = "of the GPU's memory, for copying the program's (%(default)s)"
            one.add_argument("--percent", type=int, default=40, help=help_of_percent)
        else:
            one.add_argument("--seconds", type=float, default=3.0, help="that are counted")
        if do is verdicts:
            one.add_argument("--state", default="/dev/shm", help="where what is found goes")
            one.add_argument(
                "--analyse-seconds", type=float, default=300.0, help="that it may take"
            )
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
