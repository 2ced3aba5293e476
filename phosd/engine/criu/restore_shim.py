"""Hold what a restored program needs from a process outside of it, until the program ends.

These are the other ends of its output (writing to a pipe without a reader kills it), the session of
its controlling terminal, and its parent, if it has a parent-death signal or somebody wants to know
how it ends. The shim runs CRIU and reports the result by its exit status; a child of the shim stays
until the program has closed everything.
"""

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from phosd.engine.system.privileges import become, die_with_parent, end_with, open_for_appending

_CHUNK = 1 << 16


def command(
    words: Sequence[str],
    *,
    user: tuple[int, int, Sequence[int]],
    inputs: Sequence[int],
    output: Path | None,
    terminal: int | None,
    parent: bool,
    root: int,
    end: Path | None,
) -> list[str]:
    """Return the command that runs ``words`` and then holds what is given.

    Its environment needs phosd in ``PYTHONPATH``. ``user`` are the uid, gid and groups of the
    remaining process. ``inputs`` are descriptors, read until their end into the file ``output``, or
    discarded. ``terminal`` is the slave that becomes the controlling terminal of the session.
    ``parent`` makes the shim the parent of the restored ``root`` (with CRIU's
    ``--restore-sibling``), which may write to the file ``end`` how it ends, ``exit CODE`` or
    ``signal NUMBER``.
    """
    orders = {
        "user": [user[0], user[1], list(user[2])],
        "inputs": list(inputs),
        "output": None if output is None else str(output),
        "terminal": terminal,
        "parent": parent,
        "root": root,
        "end": None if end is None else str(end),
    }
    return [
        sys.executable,
        "-S",
        "-P",
        "-m",
        "phosd.engine.criu.restore_shim",
        json.dumps(orders),
        *words,
    ]


def main() -> None:
    orders, words = json.loads(sys.argv[1]), sys.argv[2:]
    reader, writer = os.pipe()
    first = os.getpid()
    if os.fork() != 0:
        os.close(writer)
        status = os.read(reader, 1)
        sys.exit(status[0] if status else 1)
    os.close(reader)
    os.setsid()
    end_with(first)  # a cancelled restore must not complete later
    keeper = os.getpid()
    uid, gid, groups = orders["user"]

    def opened(path: str | None) -> int | None:
        if path is None:
            return None
        return open_for_appending(path, uid=uid, gid=gid, groups=groups)

    output, end = opened(orders["output"]), opened(orders["end"])
    terminal = orders["terminal"]
    if terminal is not None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    code = subprocess.run(
        words,
        stdin=terminal,
        stdout=terminal,
        close_fds=False,
        # CRIU's launcher arranges that itself only after a moment.
        preexec_fn=lambda: end_with(keeper),
        check=False,
    ).returncode
    die_with_parent(0)
    os.write(writer, bytes([code if 0 <= code < 256 else 1]))
    if code != 0:
        return
    if uid != 0:
        become(uid, gid, groups)
    _close_all_but({*orders["inputs"], output, end})
    os.chdir("/")
    _relay(orders["inputs"], output, orders["root"] if orders["parent"] else None, end)
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            os.wait()


def _close_all_but(kept: set[int | None]) -> None:
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor, closed by now
                os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard not in kept and standard != null:
            os.dup2(null, standard)


def _relay(inputs: list[int], output: int | None, child: int | None, end: int | None) -> None:
    """Pass on what is written, until all have closed it, and wait for the end of the child."""
    poller = select.poll()
    left = set(inputs)
    ended = None
    if child is not None:
        ended = os.pidfd_open(child)
        left.add(ended)
    for descriptor in left:
        poller.register(descriptor, select.POLLIN)
    while left:
        for descriptor, _ in poller.poll():
            if descriptor == ended:
                assert child is not None
                _note_end(end, os.waitpid(child, 0)[1])
                poller.unregister(descriptor)
                left.discard(descriptor)
                continue
            try:
                data = os.read(descriptor, _CHUNK)
            except OSError:  # EIO: all have closed the terminal
                data = b""
            if not data:
                poller.unregister(descriptor)
                left.discard(descriptor)
                os.close(descriptor)
            elif output is not None:
                _write(output, data)


def _note_end(end: int | None, status: int) -> None:
    if end is not None:
        code = os.waitstatus_to_exitcode(status)
        _write(end, f"exit {code}\n".encode() if code >= 0 else f"signal {-code}\n".encode())


def _write(output: int, data: bytes) -> None:
    """Write ``data``. What does not fit on the disk is lost: the program must not stop."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(output, data) :]


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
