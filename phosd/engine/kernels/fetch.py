"""Fetch the bytes of an image that a process has loaded kernels from, with its owner's rights."""

import os
import subprocess
import sys
import threading
import time

import msgspec

from phosd.engine.hook_client.code_images import MAX_BYTES, CodeImage, Held
from phosd.engine.kernels.module import Module, memory_file
from phosd.engine.kernels.reader import Orders
from phosd.engine.system import procfs
from phosd.engine.system.host_memory import available_memory
from phosd.engine.system.native import python_environment
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.reaping import reap_later
from phosd.errors import Cancelled, NoSuchProcess, Timeout, Unsupported

TIMEOUT = 20.0
"""Seconds that the copy may take. A file system or memory that never answers ends it."""
_SHARE = 8
"""An image may take one part in so many of the host's free memory."""
_LOOK_SECONDS = 0.02


def fetch(
    process: ProcessId, image: CodeImage, stopped: threading.Event, patience: float = TIMEOUT
) -> Module:
    """Return an image's bytes, for the caller to close.

    They are whatever the process says that they are: for whoever takes them for its own kernels.
    Raises :class:`Unsupported` if they cannot be had, :class:`Timeout` if that takes too long,
    :class:`NoSuchProcess` if the process has ended, and :class:`Cancelled` if ``stopped`` is set
    meanwhile.
    """
    if image.held is Held.NOT_KEPT:
        raise _no_bytes("the program has not kept it, as it keeps no more of what it compiles")
    most = min(MAX_BYTES, available_memory() // _SHARE)
    if not 0 < image.size <= most or not 0 <= image.address < 1 << 63:
        raise _no_bytes(f"{image.size} bytes at {image.address:#x} are no image that is read")
    copy = memory_file("module")
    try:
        _copy(process, image, copy, stopped, patience)
    except BaseException:
        os.close(copy)
        raise
    module = Module(copy)
    if module.hash != image.hash:
        os.close(module.file)
        raise _no_bytes("it is not what it was when it was loaded")
    return module


def _copy(
    process: ProcessId, image: CodeImage, copy: int, stopped: threading.Event, patience: float
) -> None:
    folder = procfs.PROC / str(process.pid)
    in_file = image.held is Held.IN_FILE
    try:
        flags = os.O_PATH | os.O_DIRECTORY if in_file else os.O_RDONLY
        source = os.open(folder / ("root" if in_file else "mem"), flags | os.O_CLOEXEC)
        try:
            status = procfs.status(process.pid)
            if procfs.process_id(process.pid) != process:
                raise ProcessLookupError
            orders = Orders(
                status.uids[1],
                status.gids[1],
                tuple(status.groups),
                image.address,
                image.size,
                image.path if in_file else "",
            )
            why = _read(orders, source, copy, stopped, patience)
        finally:
            os.close(source)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NoSuchProcess(
            f"process {process.pid} has ended", hint="`phos ps` lists the GPU processes"
        ) from error
    except OSError as error:
        raise _no_bytes(error.strerror or str(error)) from error
    if why:
        raise _no_bytes(why)


def _read(orders: Orders, source: int, copy: int, stopped: threading.Event, patience: float) -> str:
    """Let the reader copy what it is to. Return why it has not, or an empty text."""
    child = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "phosd.engine.kernels.reader"),
            *(msgspec.json.encode(orders).decode(), str(source), str(copy)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env=python_environment(),
        pass_fds=(source, copy),
        start_new_session=True,
    )
    assert child.stderr is not None
    end = time.monotonic() + patience
    while child.poll() is None:
        if stopped.wait(_LOOK_SECONDS) or time.monotonic() > end:
            child.kill()
            reap_later(child)
            if stopped.is_set():
                raise Cancelled("the reading of an image was ended", hint="phosd is ending")
            raise Timeout(
                f"the code of an image could not be read within {patience:.3g} s",
                hint="see what the file system that it is on waits for",
            )
    with child.stderr as said:
        text = said.read(200).decode(errors="replace").strip()
    return "" if child.returncode == 0 else text.splitlines()[-1] if text else "it cannot be read"


def _no_bytes(why: str) -> Unsupported:
    return Unsupported(
        f"the code of an image cannot be had: {why}",
        hint="its kernels count as writing through each of their pointers",
        reason="no-code",
    )
