"""Run a program whose launches are run twice, and say which left the same memory (``twice``).

``bench/twice`` is what is loaded into the program: it is compiled here, and needs a real GPU with
CUPTI. Its lines are kept for ``bench.truth``.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.launches import COMPILED, UNKNOWN, name_of, store_code
from bench.series import start
from phosd.errors import PhosError

ENDING = ".instances"
_RECORDS = ".records"
SOURCES = Path(__file__).parent / "twice"
_HEADER = Path(__file__).parents[1] / "packaging" / "find_cuda_header.py"
_CUPTI = "libcupti.so.13"
_LOOK_SECONDS = 0.5
_TAIL = 2000


class Instance(msgspec.Struct, frozen=True):
    """A launch that was run twice: its kernel, in a file of ``code``, if that is known, its
    parameters, and the memory around what these point to. ``same``: memory was the same after both;
    None: the second has not ended. ``strays`` of its parameters point to memory that was not looked
    at.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    extents: tuple[tuple[int, int], ...] = ()
    strays: int = 0
    same: bool | None = None
    library: str = UNKNOWN
    code: str = ""

    @property
    def judged(self) -> bool:
        """Whether the truth is known."""
        return self.same is not None and not self.strays


class Image(NamedTuple):
    """The bytes of an image: of a library, or of a file of their own. No path: not known."""

    library: str = ""
    path: str = ""
    offset: int = 0
    size: int = 0

    def read(self) -> bytes:
        """Return the bytes; raises :class:`OSError`."""
        with Path(self.path).open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size or -1)


@dataclass
class Records:
    """What the library has written of a program, instances by their numbers."""

    attached: bool = False
    instances: dict[int, Instance] = field(default_factory=dict)
    images: dict[int, Image] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def read_records(path: Path) -> Records:
    """Read the lines about a program. The last may be cut off, as the program was killed."""
    found = Records()
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        _take(found, json.loads(line))
    return found


def _take(found: Records, row: dict[str, Any]) -> None:
    match row:
        case {"begun": number}:
            found.instances[number] = msgspec.convert(
                row
                | {"parameters": bytes.fromhex(row["parameters"]), "library": UNKNOWN, "code": ""},
                Instance,
            )
            found.images[number] = Image(row["library"], row["code"], row["offset"], row["size"])
        case {"ended": number, "differing": differing}:
            begun = found.instances[number]
            found.instances[number] = msgspec.structs.replace(begun, same=differing == 0)
        case {"skipped": why, "times": times}:
            found.skipped[why] = times
        case {"error": call, "says": says, "kernel": kernel}:
            found.errors.append(f"{call}: {says} ({kernel or 'before any launch'})")
        case {"attached": _}:
            found.attached = True


def placed(records: Records, folder: Path, architecture: int) -> list[Instance]:
    """Return the instances with where their kernels came from, whose code is stored in a folder."""
    names: defaultdict[Image, set[str]] = defaultdict(set)
    for number, instance in records.instances.items():
        names[records.images[number]].add(instance.kernel)
    code: dict[Image, dict[str, str]] = {}
    for image, wanted in names.items():
        if not image.path:
            continue
        try:
            code[image] = store_code(image.read(), wanted, architecture, folder)
        except (OSError, PhosError) as error:
            records.errors.append(f"the code of {len(wanted)} kernels cannot be read: {error}")
    return [
        msgspec.structs.replace(
            instance,
            library=(image.library or COMPILED) if image.path else UNKNOWN,
            code=code.get(image, {}).get(instance.kernel, ""),
        )
        for image, instance in (
            (records.images[number], instance) for number, instance in records.instances.items()
        )
    ]


def twice(arguments: argparse.Namespace) -> None:
    """Run a program for a while, its launches twice. Fails with the end of what the program has
    printed if nothing was run twice, or something went wrong.
    """
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    program = name_of(arguments.program)
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as name:
        place = Path(name)
        log, path = place / "log", place / f"{program}{_RECORDS}"
        settings = {
            "CUDA_INJECTION64_PATH": str(built(place)),
            "TWICE_RECORDS": str(path),
            "TWICE_CUPTI": str(cupti()),
            "TWICE_INSTANCES": str(arguments.instances),
            "TWICE_PERCENT": str(arguments.percent),
        }
        training = start(log, place, *arguments.program, hooked=False, settings=settings)
        try:
            stuck = await_end(path, training.process, arguments.seconds, arguments.quiet)
        finally:
            ended = training.process.poll()
            if ended is None:
                training.kill()
        records = read_records(path)
        if ended is not None:  # no program of these does, by itself
            records.errors.append(f"the program has ended with status {ended}")
        instances = placed(records, folder, arguments.architecture)
        (folder / f"{program}{ENDING}").write_bytes(msgspec.json.encode(instances))
        said = summed_up(records, instances)
        said["hung"] = [one.kernel for one in instances if one.same is None and stuck]
        print(json.dumps({"twice": " ".join(arguments.program), **said}), flush=True)
        if said["errors"] or said["hung"]:
            sys.exit(f"the program's output ends with:\n{log.read_text()[-_TAIL:]}")


def await_end(path: Path, process: "subprocess.Popen[bytes]", seconds: float, quiet: float) -> bool:
    """Wait until the program has ended, for ``seconds``, or until nothing was written for
    ``quiet`` seconds. Returns whether that was the case: a launch that has not ended by then hangs.
    """
    end = time.monotonic() + seconds
    size, changed = 0, time.monotonic()
    while process.poll() is None and time.monotonic() < end:
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size, changed = now, time.monotonic()
        # The first line comes when the driver is initialised, long before the first launch.
        records = read_records(path)
        if records.instances and time.monotonic() - changed > quiet:
            return True
        if records.errors:
            break
        time.sleep(_LOOK_SECONDS)
    return False


def summed_up(records: Records, instances: Sequence[Instance]) -> dict[str, Any]:
    """Return the fields of a result: what was run twice, and what went wrong."""
    judged = [one for one in instances if one.judged]
    wrong = []
    if not records.attached:
        wrong.append("the library was not loaded, or could not attach to CUPTI")
    elif not instances:
        wrong.append("no launch was run twice")
    return {
        "kernels": len({(one.code, one.kernel) for one in instances}),
        "instances": len(instances),
        "same": sum(bool(one.same) for one in judged),
        "differ": sum(not one.same for one in judged),
        "strays": sum(bool(one.strays) for one in instances),
        "no_code": sum(not one.code for one in instances),
        "skipped": records.skipped,
        "errors": wrong + records.errors,
    }


def built(folder: Path) -> Path:
    """Compile the library into a folder. Raises :class:`SystemExit` with the compiler's words."""
    library = folder / "libtwice.so"
    compiled(library, sorted(SOURCES.glob("*.cpp")))
    return library


def compiled(library: Path, sources: Iterable[Path]) -> None:
    """Compile a library that is loaded beside CUDA's. Raises as :func:`built` does."""
    headers = _run([sys.executable, str(_HEADER)]).strip()
    options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    options += [f"-I{headers}", f"-I{SOURCES}", "-o", str(library)]
    _run(["g++", *options, *map(str, sources), "-ldl", "-lpthread"])


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        sys.exit(f"{words[0]} is not installed: {error}")
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr}")
    return done.stdout


def cupti() -> Path:
    """Return the CUPTI of this Python's packages, which PyTorch loads, or the toolkit's."""
    for folder in _folders():
        if (found := folder / _CUPTI).exists():
            return found
    sys.exit(f"{_CUPTI} was not found: pip install nvidia-cuda-cupti, or install the CUDA toolkit")


def _folders() -> Iterator[Path]:
    bases: Iterable[str] = dict.fromkeys([sysconfig.get_path("purelib"), *sys.path])
    for base in bases:
        yield Path(base) / "nvidia/cu13/lib"
        yield Path(base) / "nvidia/cuda_cupti/lib"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    yield toolkit / "lib64"
    yield toolkit / "extras/CUPTI/lib64"
