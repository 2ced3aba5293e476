"""Run NVIDIA's tools on bytes that users wrote: nvdisasm and ptxas.

Both are proprietary: they come with the extra ``analysis`` or with the CUDA toolkit, and are never
part of phosd. A tool is a child that can do little (``cage``): it has limits on processor time,
memory and output, no network, and nobody's rights where phosd is root. Its input is a memory file.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from phosd.engine.system import privileges
from phosd.errors import Internal, Unsupported

PROCESSOR_SECONDS = 300
DEADLINE_SECONDS = 900
"""On a machine whose processors others use, too."""
MEMORY_BYTES = 8 << 30
OUTPUT_BYTES = 4 << 30
_MESSAGE_BYTES = 2000
_NOBODY = 65534
_CAGE = Path(__file__).with_name("cage.py")


class Tool(Enum):
    """A tool, by the name of its program."""

    NVDISASM = "nvdisasm"
    PTXAS = "ptxas"


def find(tool: Tool) -> Path:
    """Return the program: of the package index, where it is installed, else of ``PATH``. Raises
    :class:`Internal` if there is none.
    """
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin" / tool.value
    if packaged.exists():
        return packaged
    if found := shutil.which(tool.value):
        return Path(found)
    raise Internal(
        f"{tool.value} is not installed",
        hint="pip install 'phosd[analysis]', or put the CUDA toolkit's bin in PATH",
        reason="missing-package",
    )


def run(tool: Tool, options: list[str], source: bytes) -> bytes:
    """Return what the tool writes for ``source``, given as a file. Raises :class:`Unsupported` if
    it fails on it, with its own words, and :class:`Internal` if it cannot be run.
    """
    program = find(tool)
    with ExitStack() as files:
        given, output, said = (
            files.enter_context(os.fdopen(os.memfd_create(name), "w+b"))
            for name in ("source", "output", "messages")
        )
        given.write(source)
        given.flush()
        # By its descriptor, since nobody may enter the folders that lead to it.
        executed = files.enter_context(program.open("rb"))
        words = [_path(executed.fileno()), *options, _path(given.fileno())]
        if tool is Tool.PTXAS:
            words += ["--output-file", _path(1)]
        inherited = executed.fileno(), given.fileno()
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
    limits = [str(number) for number in (PROCESSOR_SECONDS, MEMORY_BYTES, OUTPUT_BYTES)]
    if os.geteuid() == 0:
        words = privileges.command(
            words, uid=_NOBODY, gid=_NOBODY, groups=(), as_others=True, bounded=True
        )
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CAGE), *limits, *words],
        stdin=subprocess.DEVNULL,
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
