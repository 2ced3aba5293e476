"""Count what a program launches, and store the code of it."""

import argparse
import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from bench.restoring import await_lines
from bench.series import start
from phosd.engine.analysis.code.cubin import read
from phosd.engine.analysis.code.images import Form, entries
from phosd.engine.chunk_map.chunk_map import ChunkMap, ChunkMapStatistics
from phosd.engine.hook_client.code_images import CodeImage, Held
from phosd.engine.hook_client.link import HookLink, LaunchedKernel
from phosd.engine.hook_client.places import hooks_folder
from phosd.engine.image.manifest import CHUNK
from phosd.engine.kernels.fetch import fetch
from phosd.engine.node.launched_kernels import by_module
from phosd.engine.system import procfs
from phosd.errors import Unsupported

_LINES = 3
"""Lines of output before launches are counted."""
_PATIENCE = 30.0
COMPILED, FILE, UNKNOWN = "compiled at run time", "a file", "unknown"
"""Instead of a library: where code came from."""


class Launched(NamedTuple):
    """A kernel that a program launched. ``code`` is the name of a file, ``library`` that of what it
    was loaded from; either may be empty.
    """

    kernel: str
    launches: int
    library: str
    code: str


class Counted(NamedTuple):
    """What a program launched in some seconds, what the hook's looks at it took, and the images
    that it has loaded kernels from, by their hashes.
    """

    kernels: list[LaunchedKernel]
    looks: ChunkMapStatistics
    images: dict[int, CodeImage]


def name_of(program: Sequence[str]) -> str:
    """Return the name of the files about a program, without an ending."""
    return "-".join(program).replace("/", "_")


@contextlib.contextmanager
def running(program: Sequence[str]) -> Iterator[tuple[int, Path]]:
    """Run a program under the hook until it computes; yield its pid and its runtime folder."""
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as name:
        place = Path(name)
        (hooks_folder(place / "run") / str(os.geteuid())).mkdir(mode=0o700, parents=True)
        training = start(place / "log", place / "run", *program, hooked=True)
        try:
            await_lines(place / "log", _LINES)
            yield training.process.pid, place / "run"
        finally:
            training.kill()


def collect(arguments: argparse.Namespace) -> None:
    """Run a program, and store what it launches."""
    with running(arguments.program) as (pid, runtime):
        rows = store(pid, count(pid, runtime, arguments.seconds), arguments)
    print(f"{len(rows)} kernels, launched {sum(row.launches for row in rows)} times")


def count(pid: int, runtime: Path, seconds: float) -> Counted:
    """Count what a program launches in ``seconds``, as while copy-on-write is armed."""
    with HookLink(pid, runtime) as link:
        link.connect()
        deadline = time.monotonic() + _PATIENCE
        while not link.close_gate(_PATIENCE).settled:
            if time.monotonic() > deadline:
                raise SystemExit("the program does not come to rest")
        rows = [(block.id, -(-block.size // CHUNK)) for block in link.list_blocks()]
        with ChunkMap.create(rows, []) as chunk_map:
            link.arm(chunk_map.fd, [])
            chunk_map.watch()  # launches are counted from now on, and wait for nothing
            link.open_gate()
            time.sleep(seconds)
            kernels, looks = link.launches(), chunk_map.statistics()
            link.forget()
        return Counted(kernels, looks, {image.hash: image for image in link.images()})


def store(pid: int, counted: Counted, arguments: argparse.Namespace) -> list[Launched]:
    """Store what was counted, with the code of these kernels, in ``arguments.folder``."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Launched] = []
    for module, kernels in by_module(counted.kernels).items():
        image = counted.images.get(module)
        rows += _stored(pid, image, kernels, arguments.architecture, folder)
    (folder / f"{name_of(arguments.program)}.json").write_text(json.dumps(rows))
    return rows


def _stored(
    pid: int,
    image: CodeImage | None,
    kernels: Sequence[LaunchedKernel],
    architecture: int,
    folder: Path,
) -> Iterable[Launched]:
    """Store the code of kernels of an image, and yield them."""
    library = library_of(pid, image)
    data = None if image is None else code_of(pid, image)
    names = {kernel.name for kernel in kernels}
    code = {} if data is None else store_code(data, names, architecture, folder)
    for kernel in kernels:
        yield Launched(kernel.name, kernel.launches, library, code.get(kernel.name, ""))


def store_code(data: bytes, names: Set[str], architecture: int, folder: Path) -> dict[str, str]:
    """Store those parts of an image in a folder that have kernels of these names; return the name
    of the file for each.
    """
    code: dict[str, str] = {}
    for entry in entries(data):
        if entry.form is Form.CUBIN and entry.architecture not in (0, architecture):
            continue
        content = entry.read()
        # PTX is compiled whole; which kernels it has, the analysis says.
        has = set(read(content)) if entry.form is Form.CUBIN else set(names)
        wanted = has & (names - code.keys())
        if wanted:
            name = f"{hashlib.sha256(content).hexdigest()[:16]}.{entry.form.value}"
            (folder / name).write_bytes(content)
            code |= dict.fromkeys(wanted, name)
        if names <= code.keys():
            break  # to decompress the rest may take long
    return code


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
        return UNKNOWN
    if image.held is not Held.IN_OBJECT:
        return FILE if image.held is Held.IN_FILE else COMPILED
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        if begin <= image.address < end and len(fields) > 5:
            return Path(fields[5]).name
    return UNKNOWN
