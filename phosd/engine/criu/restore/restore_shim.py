"""Hold what a restored program needs from a process outside of it, until the program ends.

These are the other ends of its output (writing to a pipe without a reader kills it), the session of
its controlling terminal, and its parent, if it has a parent-death signal or somebody wants to know
how it ends, or gets a pid namespace of its own. The shim runs CRIU and reports the result by its
exit status; a child of the shim stays until the program has closed everything.
"""

import fcntl
import json
import os
import subprocess
import sys
import termios
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from phosd.engine.program.follower import word
from phosd.engine.program.keeper import Making, close_all_but, hold, note_end
from phosd.engine.system.privileges import become, die_with_parent, end_with, open_for_appending
from phosd.engine.system.procfs import ProcessId


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
    ended: int | None = None,
    follower: ProcessId | None = None,
    namespace: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the command that runs ``words`` and then holds what is given.

    Its environment needs phosd in ``PYTHONPATH``. ``user`` are the uid, gid and groups of the
    remaining process. ``inputs`` are descriptors, read until their end into the file ``output``, or
    discarded. ``terminal`` is the slave that becomes the controlling terminal of the session.
    ``parent`` makes the shim the parent of the restored ``root`` (with CRIU's
    ``--restore-sibling``), which may write to the file ``end`` how it ends, ``exit CODE`` or
    ``signal NUMBER``, and does so to the descriptor ``ended``. ``follower``: the process that waits
    for that. ``namespace``: the orders for the
    pid namespace that they are to make, in which the remaining process is the keeper.
    """
    orders = {
        "user": [user[0], user[1], list(user[2])],
        "inputs": list(inputs),
        "output": None if output is None else str(output),
        "terminal": terminal,
        "parent": parent,
        "root": root,
        "end": None if end is None else str(end),
        "ended": ended,
        "namespace": namespace,
    }
    return [
        sys.executable,
        "-S",
        "-P",
        "-m",
        "phosd.engine.criu.restore.restore_shim",
        word(follower),
        json.dumps(orders),
        *words,
    ]


def main() -> None:
    orders, words = json.loads(sys.argv[2]), sys.argv[3:]
    reader, writer = os.pipe()
    first = os.getpid()
    making = Making(orders["namespace"]) if orders["namespace"] else None
    if (child := os.fork()) != 0:
        os.close(writer)
        if making is not None:
            making.tell(child)
        status = os.read(reader, 1)
        sys.exit(status[0] if status else 1)
    os.close(reader)
    # A cancelled restore must not complete later.
    if making is not None:
        making.keep()
    else:
        end_with(first)
    os.setsid()
    keeper = os.getpid()
    uid, gid, groups = orders["user"]

    def opened(path: str | None) -> int | None:
        if path is None:
            return None
        return open_for_appending(path, uid=uid, gid=gid, groups=groups)

    output, end = opened(orders["output"]), opened(orders["end"])
    ended = orders["ended"]
    if ended is not None:
        os.set_inheritable(ended, False)  # CRIU needs it as little
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
    if making is not None:
        making.settle()
    if uid != 0:
        become(uid, gid, groups)
    close_all_but({*orders["inputs"], output, end, ended})
    os.chdir("/")
    root = orders["root"] if orders["parent"] else None
    hold(root, orders["inputs"], output, partial(_note_end, (end, ended)))


def _note_end(places: Collection[int | None], status: int) -> None:
    for place in places:
        note_end(place, status)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
