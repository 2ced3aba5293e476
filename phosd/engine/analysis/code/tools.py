"""Run NVIDIA's tools on bytes that users wrote: nvdisasm and ptxas.

Both are proprietary: they come with the extra ``analysis`` or with the CUDA toolkit, and are never
part of phosd. A tool is a child that can do little (``cage``): it has limits on processor time,
memory and output, no network, and where phosd is root an id that no user has. Its input is a memory
file.

A process that is confined itself opens the tools before (:func:`keep_open`), when it can still
reach them.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import Enum
from pathlib import Path

from phosd import installation
from phosd.engine.analysis.code import cage
from phosd.engine.system import privileges
from phosd.errors import Internal, Unsupported

PROCESSOR_SECONDS = 300
DEADLINE_SECONDS = 900
"""On a machine whose processors others use, too."""
MEMORY_BYTES = 8 << 30
OUTPUT_BYTES = 4 << 30
_MESSAGE_BYTES = 2000
_CAGE = Path(__file__).with_name("cage.py")
ADDED = Path("/usr/lib/phos/analysis")
"""Where `phos setup-analysis` puts the tools, for a phosd that is a package of the system."""


class Tool(Enum):
    """A tool, by the name of its program."""

    NVDISASM = "nvdisasm"
    PTXAS = "ptxas"


_open: dict[Tool, int] = {}


def keep_open() -> None:
    """Open the tools that there are for all that this process runs, as it cannot reach them soon,
    nor become somebody else.
    """
    for tool in Tool:
        with suppress(Internal):
            _open[tool] = os.open(find(tool), os.O_RDONLY | os.O_CLOEXEC)


def nobody() -> int:
    """Return an id for a process that is to have no rights: another one each time, since processes
    of one id can end each other, and look into each other's memory.
    """
    return secrets.choice(cage.IDS)


def version() -> str:
    """Return what changes when another tool is installed, or none; it says nothing else."""
    found = []
    for tool in Tool:
        with suppress(Internal, OSError):
            status = find(tool).stat()
            found.append(f"{tool.value}:{status.st_size}:{status.st_mtime_ns}")
    return " ".join(found)


def find(tool: Tool) -> Path:
    """Return the program: of the package index, where it is installed, else of ``PATH``. Raises
    :class:`Internal` if there is none.
    """
    packages = Path(sysconfig.get_path("purelib"))
    for folder in (packages / "nvidia/cu13/bin", ADDED):
        if (folder / tool.value).exists():
            return folder / tool.value
    if found := shutil.which(tool.value):
        return Path(found)
    raise Internal(
        f"{tool.value} is not installed",
        hint=f"{how_to_get()}, or put the CUDA toolkit's bin in PATH",
        reason="missing-package",
    )


def how_to_get() -> str:
    """Return what installs the tools, and what unpacks fat binaries, in the versions that phosd was
    tested with.
    """
    return installation.how_to_get("analysis", packaged="phos setup-analysis")


def run(tool: Tool, options: list[str], source: bytes) -> bytes:
    """Return what the tool writes for ``source``, given as a file. Raises :class:`Unsupported` if
    it fails on it, with its own words, and :class:`Internal` if it cannot be run.
    """
    with ExitStack() as files:
        given, output, said = (
            files.enter_context(os.fdopen(os.memfd_create(name), "w+b"))
            for name in ("source", "output", "messages")
        )
        given.write(source)
        given.flush()
        # By its descriptor, since nobody may enter the folders that lead to it.
        executed = _open.get(tool)
        if executed is None:
            executed = files.enter_context(find(tool).open("rb")).fileno()
        words = [_path(executed), *options, _path(given.fileno())]
        if tool is Tool.PTXAS:
            words += ["--output-file", _path(1)]
        inherited = executed, given.fileno()
        code = _call(words, inherited, output.fileno(), said.fileno())
        message = _read(said.fileno(), _MESSAGE_BYTES).decode(errors="replace").strip()
        if code != 0:
            raise Unsupported(
                f"{tool.value} {_end(code)}: {message or 'it says nothing'}",
                hint="the kernels of this module count as writing everywhere",
                reason="unreadable-module",
            )
        return _read(output.fileno(), OUTPUT_BYTES)


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _call(words: list[str], inherited: tuple[int, ...], output: int, said: int) -> int:
    """Run the words in the cage, and return their exit status, or the signal that ended them,
    negative.
    """
    limits = PROCESSOR_SECONDS, MEMORY_BYTES, OUTPUT_BYTES
    begin: Callable[[], None] | None = None
    if _open:  # confined already
        parent = os.getpid()

        def begin() -> None:
            cage.limit(*limits)
            cage.end_with(parent)
            cage.stay_alone()
    else:
        if os.geteuid() == 0:
            one = nobody()
            words = privileges.command(
                words, uid=one, gid=one, groups=(), bounded=True, dies_with_parent=True
            )
        words = [sys.executable, "-I", "-S", str(_CAGE), *map(str, limits), *words]
    with Path(os.devnull).open("rb") as nothing:  # a process that is confined may not write to it
        child = subprocess.Popen(
            words,
            preexec_fn=begin,
            stdin=nothing,
            stdout=output,
            stderr=said,
            env={"PATH": "/nonexistent", "LC_ALL": "C"},
            cwd="/",
            pass_fds=inherited,
            start_new_session=True,
        )
    try:
        return child.wait(DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGALRM
    finally:
        if child.poll() is None:  # its group is not the number of another one yet
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _end(code: int) -> str:
    if code >= 0:
        return f"failed with {code}"
    if -code in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL):
        return "took too long"
    if -code == signal.SIGXFSZ:
        return "wrote too much"
    return f"crashed ({signal.strsignal(-code)})"


def _read(file: int, most: int) -> bytes:
    size = min(os.fstat(file).st_size, most)
    return os.pread(file, size, 0)
