"""Measure what images have in common, and what a store takes on the disk.

    python -m bench.sharing layouts
    python -m bench.sharing images [--count N] [--width N] [--layers N] [--state DIR]
    python -m bench.sharing programs [--count N] [--state DIR] -- PROGRAM [ARGUMENTS]

``layouts`` computes, without a GPU, which part of a model's bytes is in chunks that two programs
have in common, if PyTorch's allocator places their tensors. ``images`` makes ten images of each of
several kinds of programs with such tensors (a GPT-2 unless told otherwise), and compares what the
store takes with what the images hold. It runs on the GPU that the driver on the library path has,
as root; with the software GPU::

    LD_LIBRARY_PATH=phosd/native/softgpu python -m bench.sharing images

``programs`` does so with one of ``bench/programs``: it saves one running program ten times, with
some lines of its output between; or, if ``{n}`` is in its arguments, ten such programs once each,
with numbers from 1 in its place.

Prints tables in Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.checkpoint import gone, kill_tree, wait_until
from bench.restoring import await_lines
from bench.series import start
from phosd.engine.image.manifest import CHUNK, Manifest
from phosd.engine.image.usage import Usage, file_bytes, pack_bytes
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.system.native import hook_library

PROGRAM = Path(__file__).parent / "programs" / "layout.py"
HEAD = (
    "| images | count | they hold (GB) | CRIU's of it | on the disk (GB) | ratio"
    " | longest stop (s) |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)
_LINES = 5
"""Lines of a program's output before each image."""
_MIB = 1 << 20


class Tensor(NamedTuple):
    """A tensor of ``size`` bytes."""

    name: str
    size: int
    trained: bool = False


class Placed(NamedTuple):
    """A tensor in a segment."""

    segment: int
    offset: int
    tensor: Tensor


class Allocator:
    """Where PyTorch's caching allocator places tensors that are allocated one after another.

    Its rules (c10/cuda/CUDACachingAllocator): sizes are multiples of 512 bytes. Up to 1 MiB come
    from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, others from segments of their own,
    of whole 2 MiB. The smallest free block that is large enough is taken, and its rest is kept if
    it has 512 bytes in a small segment, or more than 1 MiB in another.
    """

    def __init__(self) -> None:
        self.segments: list[int] = []
        self.placed: list[Placed] = []
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}

    def place(self, tensor: Tensor) -> None:
        """Place the next tensor."""
        size = -(-tensor.size // 512) * 512
        small = size <= _MIB
        free = self._free[small]
        fitting = [block for block in free if block[0] >= size]
        if fitting:
            block = min(fitting)
            free.remove(block)
        else:
            block = (self._segment(size), len(self.segments) - 1, 0)
        left, segment, offset = block
        self.placed.append(Placed(segment, offset, tensor))
        if left - size >= (512 if small else _MIB + 1):
            free.append((left - size, segment, offset + size))

    def _segment(self, size: int) -> int:
        whole = -(-size // CHUNK) * CHUNK
        self.segments.append(CHUNK if size <= _MIB else 20 * _MIB if size < 10 * _MIB else whole)
        return self.segments[-1]

    def chunks(self) -> Iterator[tuple[tuple[str, int, int, int], ...]]:
        """Yield the content of each chunk: the parts of tensors in it, by name, first byte, length
        and place. Memory that was never written has zeros.
        """
        by_chunk: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
        for segment, offset, tensor in self.placed:
            at = offset
            while at < offset + tensor.size:
                number = at // CHUNK
                end = min((number + 1) * CHUNK, offset + tensor.size)
                part = (tensor.name, at - offset, end - at, at % CHUNK)
                by_chunk.setdefault((segment, number), []).append(part)
                at = end
        for segment, size in enumerate(self.segments):
            for number in range(size // CHUNK):
                yield tuple(sorted(by_chunk.get((segment, number), []), key=lambda part: part[3]))


def model(width: int, layers: int, words: int, item: int = 4, *, wide: int = 4) -> list[Tensor]:
    """Return the weights of a transformer in the order in which they are moved to the GPU."""
    weights = [Tensor("words", words * width * item), Tensor("places", 1024 * width * item)]
    for layer in range(layers):
        for name, values in (
            ("norm1", width),
            ("bias1", width),
            ("qkv", 3 * width * width),
            ("qkv bias", 3 * width),
            ("out", width * width),
            ("out bias", width),
            ("norm2", width),
            ("bias2", width),
            ("up", wide * width * width),
            ("up bias", wide * width),
            ("down", wide * width * width),
            ("down bias", width),
        ):
            weights.append(Tensor(f"{layer} {name}", values * item))
    return weights


def gpt2(width: int = 768, layers: int = 12) -> list[Tensor]:
    """Return the weights of GPT-2 small, or of one with other dimensions."""
    return model(width, layers, 50257)


def placed(*groups: Sequence[Tensor]) -> Allocator:
    """Place groups of tensors, one after another."""
    allocator = Allocator()
    for tensors in groups:
        for tensor in tensors:
            allocator.place(tensor)
    return allocator


def buffers(who: str, mib: float = 6, count: int = 3) -> list[Tensor]:
    """Return tensors of a program's own."""
    return [Tensor(f"{who} {n}", int(mib * _MIB), trained=True) for n in range(count)]


def layouts() -> None:
    """Print which part of the weights a second program finds in the images of a first one."""
    models = {
        "GPT-2 small, fp32 (0.5 GB)": gpt2(),
        "GPT-2 XL, fp32 (6.2 GB)": gpt2(1600, 48),
        "7B, bf16 (13 GB)": model(4096, 32, 32000, 2),
    }
    print("| model | same order | after buffers of another size | in another order |")
    print("| --- | ---: | ---: | ---: |")
    for name, weights in models.items():
        first = {*placed(weights, buffers("a")).chunks()}
        reordered = [weights[0], *sorted(weights[1:], key=lambda tensor: tensor.name[::-1])]
        others = (
            placed(weights, buffers("b", 9)),
            placed(buffers("b", 3), weights),
            placed(reordered, buffers("b")),
        )
        total = sum(tensor.size for tensor in weights)
        own = {tensor.name for tensor in weights}
        shares = []
        for other in others:
            found = {chunk for chunk in other.chunks() if chunk in first}
            found_bytes = sum(p[2] for chunk in found for p in chunk if p[0] in own)
            shares.append(f"{100 * found_bytes / total:.1f}%")
        print(f"| {name} | " + " | ".join(shares) + " |")


class Program:
    """A running ``bench/programs/layout.py``."""

    def __init__(self, folder: Path, layout: Allocator) -> None:
        self._log = folder / "steps"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ
                | {"PHOS_RUNTIME_DIR": str(folder / "run"), "LD_PRELOAD": str(hook_library())},
                start_new_session=True,
            )
        rows = [
            (p.segment, p.offset, p.tensor.size, p.tensor.name, p.tensor.trained)
            for p in layout.placed
        ]
        self._say(json.dumps({"segments": layout.segments, "tensors": rows}))
        self._step = 0
        self._wait()
        self.pid = self._process.pid

    def step(self) -> None:
        """Let it make one step."""
        self._step += 1
        self._say("")
        self._wait()

    def kill(self) -> None:
        """End it."""
        tree = kill_tree(self.pid)
        self._process.wait()
        wait_until(lambda: gone(tree), "the pids to be free", self._log)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _wait(self) -> None:
        wanted = str(self._step)
        wait_until(lambda: wanted in self._log.read_text().split(), f"step {wanted}", self._log)


@contextmanager
def running(folder: Path, layout: Allocator) -> Iterator[Program]:
    program = Program(folder, layout)
    try:
        yield program
    finally:
        program.kill()


def images(arguments: argparse.Namespace) -> None:
    """Make images of each kind of programs; print what they hold and what they take."""
    weights = gpt2(arguments.width, arguments.layers)
    moments = [
        Tensor(f"{kind} of {t.name}", t.size, trained=True)
        for kind in ("gradient", "mean", "variance")
        for t in weights
    ]
    trained = [tensor._replace(trained=True) for tensor in weights]
    adapters = [Tensor(f"adapter {n}", _MIB // 4, trained=True) for n in range(48)]
    runs = {
        "one run that trains all weights": [placed(trained, moments, buffers("run"))],
        "one run that trains adapters": [placed(weights, adapters, buffers("run"))],
        "programs that loaded one model first": [
            placed(weights, buffers(f"program {n}", 3 + n)) for n in range(arguments.count)
        ],
        "programs that had buffers of other sizes before": [
            placed(buffers(f"program {n}", 3 + n), weights) for n in range(arguments.count)
        ],
    }
    print(HEAD)
    for name, kinds in runs.items():
        with tempfile.TemporaryDirectory(dir=arguments.state) as folder:
            made, stop = images_of(Path(folder), kinds, arguments.count // len(kinds))
        print_row(name, made, stop)


def print_row(name: str, made: Sequence[Manifest], stop: float) -> None:
    """Print what images hold and take. CRIU's files, which are not shared, are among it."""
    files = sum(map(file_bytes, made))
    held = sum(sum(pack_bytes(image).values()) for image in made) + files
    taken = Usage(made).total
    figures = (held / 1e9, files / 1e9, taken / 1e9, held / taken, stop)
    cells = " | ".join(f"{figure:.2f}" for figure in figures)
    print(f"| {name} | {len(made)} | {cells} |", flush=True)


def programs(arguments: argparse.Namespace) -> None:
    """Make images of real programs; print what they hold and what they take."""
    words: list[str] = arguments.program
    different = any("{n}" in word for word in words)
    numbers = range(1, arguments.count + 1) if different else [1]
    each = 1 if different else arguments.count
    made: list[Manifest] = []
    stop = 0.0
    with (
        tempfile.TemporaryDirectory(dir=arguments.state) as name,
        closing(Node(NodeConfig(Path(name) / "state", Path(name) / "run"))) as node,
    ):
        node.movers.mover(0)
        for number in numbers:
            log = Path(name) / "log"
            wanted = [word.replace("{n}", str(number)) for word in words]
            program = start(log, Path(name) / "run", *wanted, hooked=True)
            try:
                for _ in range(each):
                    await_lines(log, _LINES)
                    progress = Progress()
                    options = CheckpointOptions()
                    made.append(checkpoint(node, program.process.pid, options, progress))
                    stop = max(stop, progress.stop_seconds)
            finally:
                program.kill()
    print(HEAD)
    print_row(" ".join(words), made, stop)


def images_of(
    folder: Path, layouts: Sequence[Allocator], each: int
) -> tuple[list[Manifest], float]:
    """Make images of programs, one after another, with a step between two of the same program.
    Returns them, and the longest time in seconds for which a program stood still.
    """
    made: list[Manifest] = []
    stop = 0.0
    with closing(Node(NodeConfig(folder / "state", folder / "run"))) as node:
        node.movers.mover(0)
        for layout in layouts:
            with running(folder, layout) as program:
                for _ in range(each):
                    progress = Progress()
                    made.append(checkpoint(node, program.pid, CheckpointOptions(), progress))
                    stop = max(stop, progress.stop_seconds)
                    program.step()
    return made, stop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(required=True)
    what.add_parser("layouts").set_defaults(do=lambda _: layouts())
    for name, do in (("images", images), ("programs", programs)):
        one = what.add_parser(name)
        one.set_defaults(do=do)
        one.add_argument("--count", type=int, default=10, help="images of each kind")
        one.add_argument("--state", help="a folder on the disk for the images")
        if do is images:
            one.add_argument("--width", type=int, default=768, help="of the model")
            one.add_argument("--layers", type=int, default=12, help="of the model")
        else:
            one.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
