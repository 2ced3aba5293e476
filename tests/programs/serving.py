"""Serves as a model does: whoever sends a line, by TCP or by a unix socket, gets that of a step,
which is computed then. Its steps are those of ``single``.

The second argument is the unix socket's path; beside it, in ``.port``, is the TCP port. With a
third one, ``tcp``, there is no unix socket. With
``PHOS_TEST_THINKS`` it takes so many seconds before it computes what it was asked for.
"""

import contextlib
import os
import select
import socket
import sys
import time
from pathlib import Path

from gpu import Device, Report, State

THINKS = float(os.environ.get("PHOS_TEST_THINKS") or 0)


def listening(path: str, *only: str) -> list[socket.socket]:
    """Return the sockets."""
    local = [] if "tcp" in only else [socket.socket(socket.AF_UNIX)]
    for each in local:
        each.bind(path)
        each.listen()
    remote = socket.create_server(("127.0.0.1", 0))
    draft = Path(f"{path}.draft")
    draft.write_text(str(remote.getsockname()[1]))
    draft.rename(f"{path}.port")
    return [*local, remote]


def said_by(caller: socket.socket) -> bytes:
    """Return what a caller has sent; nothing if it has gone, also with an answer that it has not
    read.
    """
    with contextlib.suppress(ConnectionError):
        return caller.recv(1 << 10)
    return b""


def main() -> None:
    report = Report()
    state = State(Device())
    steps = report.steps()
    doors, callers = listening(*sys.argv[2:]), list[socket.socket]()
    while True:
        for each in select.select([*doors, *callers], [], [])[0]:
            if each in doors:
                callers.append(each.accept()[0])
            elif not said_by(each):
                callers.remove(each)
                each.close()
            else:
                time.sleep(THINKS)
                step = next(steps)
                report.tell(step, state.step(step, report.seed))
                with contextlib.suppress(ConnectionError):  # nobody waits for it any more
                    each.sendall(f"{step} {report.digest}\n".encode())


if __name__ == "__main__":
    main()
