"""Say which kernels real programs launch, and what the analysis knows of them.

    python -m bench.kernels collect FOLDER [--seconds S] [--architecture N] -- PROGRAM [ARGUMENTS]
    python -m bench.kernels table FOLDER [--architecture N] [--patience S]

``collect`` runs one of ``bench/programs`` under the hook, as root, and counts for some seconds what
it launches; it stores the counts, and the code of these kernels, in FOLDER. ``table`` analyses all
that is in FOLDER, on any machine, a process for each kernel, and prints Markdown: for each program
and each library, the share of launches of kernels whose roles and ranges are known, of those that
may always be run again, of which a launch's parameters decide that, or that never may, and why what
is unknown is.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from bench.restoring import await_lines
from bench.series import start
from phosd.engine.analysis.cubin import read
from phosd.engine.analysis.idempotency import Idempotent, of_kernel
from phosd.engine.analysis.images import Form, entries
from phosd.engine.analysis.opcodes import Use
from phosd.engine.analysis.summary import Summary, summarise
from phosd.engine.chunk_map.chunk_map import ChunkMap
from phosd.engine.hook_client.code_images import CodeImage, Held
from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.places import hooks_folder
from phosd.engine.image.manifest import CHUNK
from phosd.engine.kernels.fetch import fetch
from phosd.engine.system import procfs
from phosd.errors import PhosError, Unsupported

_LINES = 3
"""Of output before launches are counted."""
_PATIENCE = 30.0
_AGAIN = (Idempotent.ALWAYS, Idempotent.DEPENDS, Idempotent.NEVER)


class Launched(NamedTuple):
    """A kernel that a program launched. ``code`` is the name of a file, ``library`` that of what it
    was loaded from; either may be empty.
    """

    kernel: str
    launches: int
    library: str
    code: str


class Known(NamedTuple):
    """What the analysis knows of a kernel."""

    write_roles: bool
    roles: bool
    write_ranges: bool
    ranges: bool
    again: Idempotent
    decided: bool
    reasons: tuple[str, ...] = ()


def collect(arguments: argparse.Namespace) -> None:
    """Run a program, and store what it launches."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as name:
        place = Path(name)
        hooks_folder(place / "run").mkdir(parents=True)
        program = start(place / "log", place / "run", *arguments.program, hooked=True)
        try:
            await_lines(place / "log", _LINES)
            pid = program.process.pid
            with closing(HookLink(pid, place / "run")) as link:
                link.connect()
                counts = counted(link, arguments.seconds)
                images = {image.hash: image for image in link.images()}
            rows: list[Launched] = []
            for module, kernels in counts.items():
                rows += stored(pid, images.get(module), kernels, arguments.architecture, folder)
        finally:
            program.kill()
    path = folder / f"{'-'.join(arguments.program).replace('/', '_')}.json"
    path.write_text(json.dumps(rows))
    print(f"{len(rows)} kernels, launched {sum(row.launches for row in rows)} times: {path}")


def counted(link: HookLink, seconds: float) -> dict[int, dict[str, int]]:
    """Return the launches of ``seconds`` by module and name."""
    deadline = time.monotonic() + _PATIENCE
    while not link.close_gate(_PATIENCE).settled:
        if time.monotonic() > deadline:
            raise SystemExit("the program does not come to rest")
    rows = [(block.id, -(-block.size // CHUNK)) for block in link.list_blocks()]
    found: defaultdict[int, dict[str, int]] = defaultdict(dict)
    with ChunkMap.create(rows, []) as chunk_map:
        link.arm(chunk_map.fd, [])
        chunk_map.watch()  # launches are counted from now on, and wait for nothing
        link.open_gate()
        time.sleep(seconds)
        for kernel in link.kernels():
            found[kernel.module][kernel.name] = kernel.launches
        link.forget()
    return found


def stored(
    pid: int,
    image: CodeImage | None,
    kernels: Mapping[str, int],
    architecture: int,
    folder: Path,
) -> Iterable[Launched]:
    """Store the code of kernels of an image, and yield them."""
    library = library_of(pid, image)
    data = None if image is None else code_of(pid, image)
    code: dict[str, str] = {}
    for entry in entries(data) if data is not None else ():
        if entry.form is Form.CUBIN and entry.architecture not in (0, architecture):
            continue
        content = entry.read()
        # PTX is compiled whole; which kernels it has, the analysis says.
        has = set(read(content)) if entry.form is Form.CUBIN else set(kernels)
        wanted = has & (kernels.keys() - code.keys())
        if wanted:
            name = f"{hashlib.sha256(content).hexdigest()[:16]}.{entry.form.value}"
            (folder / name).write_bytes(content)
            code |= dict.fromkeys(wanted, name)
    for name, launches in kernels.items():
        yield Launched(name, launches, library, code.get(name, ""))


def code_of(pid: int, image: CodeImage) -> bytes | None:
    """Return the bytes of an image, or None if they cannot be had."""
    process = procfs.process_id(pid)
    if process is None:
        return None
    try:
        with fetch(process, image, threading.Event()) as module:
            return os.pread(module.file, module.size, 0)
    except Unsupported:
        return None


def library_of(pid: int, image: CodeImage | None) -> str:
    """Return the file name of the loaded library that an image is in, or how it came otherwise."""
    if image is None:
        return "unknown"
    if image.held is not Held.IN_OBJECT:
        return "a file" if image.held is Held.IN_FILE else "compiled at run time"
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        if begin <= image.address < end and len(fields) > 5:
            return Path(fields[5]).name
    return "unknown"


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
    for name, do in (("collect", collect), ("table", table)):
        one = what.add_parser(name)
        one.set_defaults(do=do)
        one.add_argument("folder", type=Path)
        one.add_argument("--architecture", type=int, default=90)
        if do is collect:
            one.add_argument("--seconds", type=float, default=3.0, help="that are counted")
            one.add_argument("program", nargs="+")
        else:
            one.add_argument("--patience", type=float, default=60.0, help="seconds for a kernel")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
