"""Compare verdicts on launches with what running these twice has shown (``bench.rerun``)."""

import argparse
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.launches import Launched
from bench.rerun import ENDING, Instance
from phosd.engine.analysis.reference.evaluation import Launch
from phosd.engine.analysis.reference.launch_verdict import Verdict, of_launch
from phosd.engine.analysis.summary import Summary, summarise
from phosd.engine.analysis.table import encode
from phosd.errors import PhosError, Unsupported
from tests.native.analysis import in_hook

_MODULE = 1
"""The number of the only module in a table."""
SEVERAL = "several kernels of this name"
NO_CODE = "no code"
_UNKNOWN = "unknown"
_INSTANCES = list[Instance]


class Kernel(NamedTuple):
    """A kernel, in a file of code."""

    code: str
    name: str


class Judged(NamedTuple):
    """The verdicts on an instance: of the hook's code, and of the analysis."""

    hook: str
    analysis: str


NOTHING = Judged(_UNKNOWN, _UNKNOWN)


@dataclass
class Tally:
    """How many of some instances are idempotent in truth, and how many got which verdict."""

    instances: int = 0
    truly: int = 0
    said: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Judged._fields, 0))
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Judged._fields, 0))
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Judged._fields, 0))

    def add(self, instance: Instance, judged: Judged) -> None:
        """Count an instance of which the truth is known."""
        same = bool(instance.same)
        self.instances += 1
        self.truly += same
        for who, verdict in judged._asdict().items():
            says_so = verdict == Verdict.IDEMPOTENT.value
            self.said[who] += says_so
            self.missed[who] += same and not says_so
            self.wrong[who] += says_so and not same

    def row(self, name: str) -> str:
        """Return a row of the table."""
        parts = [f"{self.instances}", f"{self.truly}"]
        for who in Judged._fields:
            share = f"{self.missed[who] / self.truly:.1%}" if self.truly else ""
            parts += [f"{self.said[who]}", f"{self.missed[who]} ({share})", f"{self.wrong[who]}"]
        return f"| {name} | {' | '.join(parts)} |"


@dataclass
class Compared:
    """The instances of a program: each with its library and the verdicts."""

    program: str
    rows: list[tuple[str, Instance, Judged]] = field(default_factory=list)


def truth(arguments: argparse.Namespace) -> None:
    """Print the table; exits with failure if a verdict was wrong."""
    compared = list(compare(arguments.folder, arguments.architecture, arguments.patience))
    if not compared:
        sys.exit(f"nothing in {arguments.folder} was run twice: python -m bench.kernels twice")
    print(table(compared))
    wrong = list(false_positives(compared))
    print("\n".join(wrong))
    if wrong:
        sys.exit(f"{len(wrong)} verdicts are wrong")


def false_positives(compared: Iterable[Compared]) -> Iterator[str]:
    """Describe the instances that are not idempotent, although a verdict says so."""
    for one in compared:
        for library, instance, judged in one.rows:
            if instance.same or Verdict.IDEMPOTENT.value not in judged:
                continue
            said = ", ".join(f"{who}: {verdict}" for who, verdict in judged._asdict().items())
            yield (
                f"\nfalse positive: {instance.kernel} ({library}, {one.program}; {said})\n"
                f"  code {instance.code}, grid {instance.grid}, block {instance.block}\n"
                f"  extents {instance.extents}\n  parameters {instance.parameters.hex()}"
            )


def table(compared: Iterable[Compared]) -> str:
    """Return the Markdown table, by program and by library."""
    programs: defaultdict[str, Tally] = defaultdict(Tally)
    libraries: defaultdict[str, Tally] = defaultdict(Tally)
    for one in compared:
        for library, instance, judged in one.rows:
            programs[one.program].add(instance, judged)
            libraries[f"all: {library}"].add(instance, judged)
    heads = ["instances", "idempotent"]
    for who in Judged._fields:
        heads += [f"{who}: idempotent", "missed", "wrong"]
    lines = [f"| run twice | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    lines += [tally.row(name) for name, tally in programs.items()]
    lines += [tally.row(name) for name, tally in sorted(libraries.items())]
    return "\n".join(lines)


def compare(folder: Path, architecture: int, patience: float) -> Iterator[Compared]:
    """Yield the programs of a folder, with the verdicts on what they launched."""
    found: list[tuple[Compared, list[tuple[Kernel, str, Instance]]]] = []
    wanted: defaultdict[Kernel, list[Instance]] = defaultdict(list)
    for path in sorted(folder.glob(f"*{ENDING}")):
        program = path.name.removesuffix(ENDING)
        launched = folder / f"{program}.json"
        rows = json.loads(launched.read_text()) if launched.exists() else []
        by_name = placed(Launched(*row) for row in rows)
        one = Compared(program)
        instances = []
        for instance in msgspec.json.decode(path.read_bytes(), type=_INSTANCES):
            if not instance.judged:
                continue
            code, library = instance.code, instance.library
            if not code:  # CUPTI has not told what it was loaded from
                code, library = by_name.get(instance.kernel, ("", NO_CODE))
            kernel = Kernel(code, instance.kernel)
            instances.append((kernel, library, instance))
            if code:
                wanted[kernel].append(instance)
        found.append((one, instances))
    verdicts = judged_all(folder, wanted, architecture, patience)
    for one, instances in found:
        for kernel, library, instance in instances:
            one.rows.append((library, instance, verdicts.get((kernel, instance), NOTHING)))
        yield one


def placed(rows: Iterable[Launched]) -> dict[str, tuple[str, str]]:
    """Return the file of code and the library of each kernel by its name; a name that several have
    is counted apart.
    """
    found: dict[str, tuple[str, str]] = {}
    for row in rows:
        place = (row.code, row.library if row.code else NO_CODE)
        if found.setdefault(row.kernel, place) != place:
            found[row.kernel] = "", SEVERAL
    return found


def judged_all(
    folder: Path,
    wanted: Mapping[Kernel, Sequence[Instance]],
    architecture: int,
    patience: float,
) -> dict[tuple[Kernel, Instance], Judged]:
    """Return the verdicts on instances, with a process for each kernel."""
    found: dict[tuple[Kernel, Instance], Judged] = {}
    # What takes too long is left; it ends with the pool.
    with multiprocessing.Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        begun = {
            kernel: pool.apply_async(
                judged_of, (folder / kernel.code, kernel.name, instances, architecture)
            )
            for kernel, instances in wanted.items()
        }
        for kernel, result in begun.items():
            try:
                verdicts = result.get(patience)
            except multiprocessing.TimeoutError:
                continue
            for instance, judged in zip(wanted[kernel], verdicts, strict=True):
                found[kernel, instance] = judged
    return found


def judged_of(
    path: Path, name: str, instances: Sequence[Instance], architecture: int
) -> list[Judged]:
    """Return the verdicts on instances of a kernel in a file of code."""
    try:
        summaries = list(summarise(path.read_bytes(), architecture, [name]))
    except PhosError:
        summaries = []
    if len(summaries) != 1:
        return [NOTHING] * len(instances)
    (summary,) = summaries
    try:
        refused = in_hook.take(encode(_MODULE, architecture, summaries))
    except Unsupported as error:
        refused = error.what
    return [judged(summary, instance, in_table=not refused) for instance in instances]


def judged(summary: Summary, instance: Instance, *, in_table: bool) -> Judged:
    """Return the verdicts on an instance."""
    launch = Launch(instance.parameters, instance.block, instance.grid)

    def extent(address: int) -> tuple[int, int] | None:
        around = (one for one in instance.extents if one[0] <= address < one[1])
        return next(around, None)

    analysis = of_launch(summary, launch, extent).verdict.value
    if not in_table:
        return Judged(_UNKNOWN, analysis)
    told = in_hook.accesses(_MODULE, instance.kernel, launch, instance.extents)
    return Judged(_UNKNOWN if told is None else told.verdict, analysis)
