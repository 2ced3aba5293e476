"""Make docs/compatibility.md, which answers by name whether a program works.

Rows come from the latest result of each entry of the matrix (:mod:`bench.matrix`), and from
``known.toml``, which has what other pages tell. An entry with neither was not tried.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.entries import ENTRIES, KINDS, LONG, Entry
from bench.matrix import read, verdict

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "compatibility.md"
_KNOWN = Path(__file__).with_name("known.toml")
_OTHER_KINDS = ("Containers and schedulers", "Hardware and drivers")
_NOT_TRIED = "not tried"
_PID = re.compile(r"pid \d+")
_MOST_SAID = 120
"""Characters of a message that the page shows; the results have all."""


@dataclass(frozen=True)
class Results:
    """A file of results, and the GPUs and driver of those that do not tell it."""

    name: str
    on: str = ""

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the latest result of each entry."""
        found = read(_DOCS / "benchmarks" / self.name)
        return {name: result for (name, _), result in found.items()}


_RESULTS = (
    Results("h200-matrix.jsonl", "H200, driver 580.159"),
    Results("h100-several-gpus.jsonl", "two H100s, driver 580.159"),
    Results("programs.jsonl"),
)
"""Where several have an entry, the last one counts."""


@dataclass(frozen=True)
class Row:
    """What is known of a name."""

    name: str
    answer: str
    tried_with: str = ""
    on: str = ""
    seconds: str = ""
    """Those of the last stop and of the restore."""
    where: str = ""

    def __str__(self) -> str:
        cells = (self.name, self.answer, self.tried_with, self.on, self.seconds, self.where)
        return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the page."""
    found: dict[str, dict[str, Row]] = {kind: {} for kind in (*KINDS, *_OTHER_KINDS)}
    for kind, key, row in _known():
        found[kind][key] = row
    for results in _RESULTS:
        for name, result in results.latest().items():
            if name in ENTRIES:
                found[_KIND_OF[name]][name] = _tried(ENTRIES[name], result, results)
    for name, entry in ENTRIES.items():
        found[_KIND_OF[name]].setdefault(name, Row(entry.title, _NOT_TRIED))
    order = [*(kind for kind in KINDS if kind != LONG), LONG, *_OTHER_KINDS]
    return _HEAD + "".join(_table(kind, [*found[kind].values()]) for kind in order)


_KIND_OF = {name: kind for kind, entries in KINDS.items() for name in entries}


def _known() -> Iterator[tuple[str, str, Row]]:
    """Yield what other pages tell, with its kind, and the entry or the name that it is of."""
    rows: list[Mapping[str, str]] = tomllib.loads(_KNOWN.read_text())["known"]
    for row in rows:
        entry = row.get("entry", "")
        if entry and entry not in ENTRIES:
            raise ValueError(f"{_KNOWN}: there is no entry {entry}")
        tried_with, on = row.get("with", ""), row.get("on", "")
        yield (
            row["kind"],
            entry or row["name"],
            Row(row["name"], row["answer"], tried_with, on, where=row.get("where", "")),
        )


def _tried(entry: Entry, result: Mapping[str, Any], results: Results) -> Row:
    seconds = ""
    if (saved := result.get("saved")) and "restore_s" in result:
        seconds = f"{saved[-1]['stop_s']:.2f}, {result['restore_s']:.1f}"
    on = f"{result['gpu']}, driver {result['driver']}" if "driver" in result else results.on
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    where = f"[results](benchmarks/{results.name})"
    return Row(entry.title, _answer(entry, result), versions, on, seconds, where)


def _answer(entry: Entry, result: Mapping[str, Any]) -> str:
    found = verdict(result)
    if found == "restored":
        also = f" with `{' '.join(entry.options)}`" if entry.options else ""
        apart = "; as far apart as two undisturbed runs" if result["apart"] else ""
        return f"works{also}{apart}"
    if found == "refused":
        remedy = f" **Remedy:** {entry.remedy}" if entry.remedy else ""
        return f"refused: {_short(result['refused'])}{remedy}"
    if found == "ended":
        told = _short(result["ended"][-_MOST_SAID:])
    elif found == "grown":
        told = f"holds more and more: {result['grown']}"
    elif found == "differs":
        told = f"values differ by up to {result['apart']:.1e}"
    else:
        told = "nothing was printed twice, so that nothing was compared"
    return f"**fails**: {told}"


def _short(said: str) -> str:
    said = _PID.sub("a process", " ".join(said.replace("|", "/").split()))
    return f"{said[:_MOST_SAID]}{'...' if len(said) > _MOST_SAID else ''}"


def _table(kind: str, rows: list[Row]) -> str:
    ordered = sorted(rows, key=lambda row: row.name.casefold())
    return "\n".join(["", f"## {kind}", "", _COLUMNS, *map(str, ordered), ""])


_HEAD = """# What works

This page lists the programs that were tried, and what came of each. For one of yours, ask phosd:

```console
$ phos checkpoint bert --dry-run
CHECK            RESULT  DETAILS
processes        ✓       1 in all; with GPU: 22303
sandbox          ✓
other programs   ✓
pid namespace    ✓
mode             ✓       concurrent: the hook can park the device memory and copy it afterwards
memory and disk  ✓       about 96.8 MiB
```

The tables are sorted. All of them are about NVIDIA's GPUs: AMD's and Intel's are
[not supported](limits.md#where-programs-can-go).

- **works**: the program ran under `phos run`, was saved while it computed, killed with its whole
  process tree, and restored. The values that it printed after the checkpoint and again after the
  restore are equal, bit for bit, unless the row says otherwise. *Works with*: an option is needed.
- **refused**: the job fails, says why, and the program goes on.
- **fails**, or a sentence in bold: do not do it.
- **not tried**: nothing is known. [What phosd does not do](limits.md) may tell.

*Seconds*: how long the program stood still for its last checkpoint, and how long its restore took;
images in memory. Up to 13 programs shared a GPU, so these are times of a busy machine
([benchmarks](benchmarks.md) has others). The last column has the raw results, or the page that says
how it was tried. `python -m bench.matrix NAME` tries a program of `bench/programs`.

This page is made by `python packaging/make_pages.py` from those results and `bench/known.toml`.
"""

_COLUMNS = """\
| name | does it work? | tried with | on | seconds | where |
| --- | --- | --- | --- | --- | --- |"""
