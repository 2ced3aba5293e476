"""Stays behind after a restore, for what the restored program needs somebody to hold.

Three things: the other ends of its output (a pipe without a reader kills it at its first print),
the session of a terminal that it was a job of, and its parent, if it asked for a signal when that
ends. It runs CRIU, tells how that went by its exit status, and a child of it stays until the
program has closed everything.
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
) -> list[str]:
    """The command that runs ``words`` and keeps. Its environment needs phosd in ``PYTHONPATH``.

    ``user`` are uid, gid and groups of the keeper, afterwards. ``inputs`` are descriptors, read
    until their end into the file ``output``, or nowhere. ``terminal`` is the slave to have as the
    controlling terminal of the session. ``parent`` makes the keeper the parent of the restored
    root (with CRIU's ``--restore-sibling``).
    """
    orders = {
        "user": [user[0], user[1], list(user[2])],
        "inputs": list(inputs),
        "output": None if output is None else str(output),
        "terminal": terminal,
        "parent": parent,
    }
    return [
        sys.executable,
        "-S",
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
    end_with(first)  # a restore that is given up must not come up later
    keeper = os.getpid()
    uid, gid, groups = orders["user"]
    output = None
    if orders["output"] is not None:
        output = open_for_appending(orders["output"], uid=uid, gid=gid, groups=groups)
    terminal = orders["terminal"]
    if terminal is not None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    code = subprocess.run(
        words,
        stdin=terminal,
        stdout=terminal,
        close_fds=False,
        preexec_fn=lambda: end_with(keeper),  # it takes a moment to see to that itself
        check=False,
    ).returncode
    die_with_parent(0)
    os.write(writer, bytes([code if 0 <= code < 256 else 1]))
    if code != 0:
        return
    if uid != 0:
        become(uid, gid, groups)
    _close_all_but({*orders["inputs"], output})
    os.chdir("/")
    _relay(orders["inputs"], output)
    if orders["parent"]:
        with contextlib.suppress(ChildProcessError):  # no child is left
            while True:
                os.wait()


def _close_all_but(kept: set[int | None]) -> None:
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard not in kept and standard != null:
            os.dup2(null, standard)


def _relay(inputs: list[int], output: int | None) -> None:
    poller = select.poll()
    for descriptor in inputs:
        poller.register(descriptor, select.POLLIN)
    left = set(inputs)
    while left:
        for descriptor, _ in poller.poll():
            try:
                data = os.read(descriptor, _CHUNK)
            except OSError:  # EIO: nobody has the terminal open any more
                data = b""
            if not data:
                poller.unregister(descriptor)
                left.discard(descriptor)
                os.close(descriptor)
            elif output is not None:
                _write(output, data)


def _write(output: int, data: bytes) -> None:
    """A full disk must not stop the program: what cannot be written is lost, as documented."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(output, data) :]


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
