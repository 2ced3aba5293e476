"""Analyse what is installed, ahead of time: the modules in files, or in the files of folders."""

import glob
import mmap
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.analysis.code.images import loadable
from phosd.engine.hook_client.code_images import MAX_BYTES
from phosd.engine.kernels.analyser import Analyser
from phosd.engine.kernels.entry import Entry, State
from phosd.engine.kernels.module import Module
from phosd.errors import InvalidOption

_INSTALLED = (
    "/usr/local/cuda*/targets/x86_64-linux/lib",
    "/usr/lib/x86_64-linux-gnu/libcu*.so.*",
    "/usr/lib/x86_64-linux-gnu/libnccl.so.*",
    "{python}/nvidia/*/lib",
    "{python}/torch/lib",
)
"""Where libraries with kernels are: of CUDA's toolkit, and of the Python that phosd runs with."""
_ENDINGS = (".cubin", ".fatbin", ".ptx")


@dataclass
class Warmed:
    """What came of a file: its ``modules``, the ``kernels`` that are known now, with those whose
    ``roles`` and ``ranges`` are known; ``failed`` are modules that cannot be analysed.
    """

    modules: int = 0
    kernels: int = 0
    roles: int = 0
    ranges: int = 0
    failed: int = 0
    early: int = 0
    """Modules that are not analysed to the end, as their limit or an interruption came before."""

    def add(self, entry: Entry, *, whole: bool) -> None:
        """Count what is known of a module."""
        self.modules += 1
        self.kernels += len(entry.kernels)
        for facts in entry.kernels.values():
            self.roles += not (facts.unknown_reads or facts.unknown_writes)
            self.ranges += facts.ranges_read and facts.ranges_written
        self.failed += entry.state is not State.ANALYSED
        self.early += entry.state is State.ANALYSED and not whole


def installed() -> list[Path]:
    """Return the folders and libraries of this machine in which kernels are to be expected."""
    patterns = (each.format(python=sysconfig.get_path("purelib")) for each in _INSTALLED)
    return [Path(found) for each in patterns for found in sorted(glob.glob(each))]  # noqa: PTH207


def files(paths: Iterable[Path]) -> list[Path]:
    """Return these files, and those in these folders that may have kernels, each once. Raises
    :class:`InvalidOption` for what is neither.
    """
    found: dict[tuple[int, int], Path] = {}
    for path in paths:
        if path.is_dir():
            each = [one for one in sorted(path.rglob("*")) if _may_have_kernels(one)]
        elif path.is_file():
            each = [path]
        else:
            raise InvalidOption(
                f"{path} is neither a file nor a folder", hint="name libraries, or their folders"
            )
        for one in each:
            status = one.stat()
            found.setdefault((status.st_dev, status.st_ino), one)
    return list(found.values())


def modules(path: Path) -> Iterator[bytes]:
    """Yield the modules in a file. Raises :class:`OSError` if it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return
        with mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ) as content:
            for each in loadable(content):
                if len(each) <= MAX_BYTES:
                    yield each
    finally:
        os.close(descriptor)


def warm(
    analyser: Analyser, data: bytes, architecture: int, tell: Callable[[int], None]
) -> tuple[Entry, bool]:
    """Analyse all kernels of a module, however often its time ends before. Returns what is known of
    it then, and whether that is all that can be.
    """
    with Module.of(data) as module:
        known = -1
        while True:
            found = analyser.analyse(module, architecture, None, tell)
            whole = found.entry.whole or found.entry.state is not State.ANALYSED
            if whole or len(found.entry.kernels) <= known:
                return found.entry, whole
            known = len(found.entry.kernels)


def _may_have_kernels(path: Path) -> bool:
    named = path.suffix in _ENDINGS or ".so" in path.suffixes
    return named and path.is_file()
