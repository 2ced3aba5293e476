"""Hash, compare, cut and replace the files of a tree, in a process with the owner's ids.

It is a process of its own (``-m``, started by :class:`Worker`), because it opens paths that a user
named, perhaps on a file system that never answers. Orders and answers are JSON objects, each after
its length, on the socket that is its standard input.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Self

import msgspec

from phosd import unix_sockets
from phosd.engine.criu.files.file_orders import (
    Answer,
    Change,
    Copied,
    Hashed,
    Inode,
    Orders,
    Output,
    Outputs,
    Policy,
)
from phosd.engine.criu.files.file_work import perform
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.system.native import python_environment
from phosd.engine.system.privileges import become
from phosd.engine.system.reaping import reap_later
from phosd.errors import Internal, Reason, Timeout, Unsupported

__all__ = [
    "LONG_TIMEOUT",
    "SHORT_TIMEOUT",
    "Answer",
    "Change",
    "Copied",
    "Hashed",
    "Inode",
    "Orders",
    "Output",
    "Outputs",
    "Policy",
    "Worker",
    "require_usable",
    "work",
]

LONG_TIMEOUT = 600.0
"""Seconds that the file work of a restore may take."""
SHORT_TIMEOUT = 5.0
"""Seconds that it may take while a program stands still, or others wait."""
_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 16
_MOST_BYTES = 64 << 20
"""Most bytes of an answer: the worker's user can make it say anything."""
_LOOK_SECONDS = 0.5
"""Seconds between two looks whether it is cancelled."""


class Worker:
    """A process with the owner's ids that carries out orders, one after the other.

    ``sources`` are descriptors that it inherits. Leaving the context ends it, whatever it does.
    """

    def __init__(self, uid: int, sources: Sequence[int] = ()) -> None:
        self._uid = uid
        self._socket, theirs = unix_sockets.pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phosd.engine.criu.files.file_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=sources,
                env=python_environment(),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self,
        orders: Orders,
        patience: float = LONG_TIMEOUT,
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Let the process carry out ``orders``.

        Raises :class:`Internal` if it fails, :class:`Timeout` if it takes longer than ``patience``
        seconds, and :class:`Cancelled`; it does nothing more then. Only orders that change nothing
        may be cancelled.
        """
        self.order(orders)
        return self.answer(patience, cancellation)

    def order(self, orders: Orders) -> None:
        """Tell it what to do, while the caller goes on to something else."""
        text = msgspec.json.encode(orders)
        self._socket.settimeout(LONG_TIMEOUT)
        with suppress(BrokenPipeError, ConnectionResetError):  # its answer says why
            self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def answer(
        self, patience: float = LONG_TIMEOUT, cancellation: Cancellation | None = None
    ) -> Answer:
        """Return what has come of that. Raises as :meth:`ask` does."""
        end = time.monotonic() + patience
        data = b""
        while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            self._socket.settimeout(max(0.0, min(_LOOK_SECONDS, end - time.monotonic())))
            try:
                more = unix_sockets.receive(self._socket, _CHUNK)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() >= end:
                    raise Timeout(
                        f"working on the files of user {self._uid} takes longer than "
                        f"{patience:.0f} s",
                        hint="look whether the file systems that they are on answer, and try again",
                    ) from None
                if cancellation is not None:
                    cancellation.check()
                continue
            except ConnectionError:
                more = b""
            if not more or len(data) > _MOST_BYTES:
                raise self._failure()
            data += more
        return msgspec.json.decode(data[_LENGTH.size :], type=Answer)

    def _failure(self) -> Internal:
        assert self._process.stderr is not None
        self._process.kill()
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return Internal(
            f"working on the files of user {self._uid} failed: {''.join(said)}",
            hint="the files are as they were",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        unix_sockets.close(self._socket)
        self._process.kill()
        reap_later(self._process)


def work(
    orders: Orders, patience: float = LONG_TIMEOUT, cancellation: Cancellation | None = None
) -> Answer:
    """Let one process carry out ``orders`` alone, as :meth:`Worker.ask` does."""
    with Worker(orders.uid, orders.inherited) as worker:
        return worker.ask(orders, patience, cancellation)


def require_usable(answer: Answer, policy: Policy | None = None) -> None:
    """Raise :class:`Unsupported` with the problems of ``answer``, if there are any."""
    if answer.problems:
        instead = {
            Policy.ROLLBACK: "the image does not have them; `--files as-is` takes what there is",
            Policy.AS_IS: "the image does not have them",
        }
        raise Unsupported(
            "the program's files are not as they were: " + "; ".join(answer.problems[:5]),
            hint="bring them back to their state at the checkpoint and try again; "
            + instead.get(
                policy or Policy.KEEP, "`--files rollback` puts those back that the image has"
            ),
            reason=Reason.CHANGED_FILES,
        )


def _end_with(stream: socket.socket) -> None:
    """Wait until whoever gives the orders has gone, and end. The kernel would end this process
    already with the thread that had started it.
    """
    gone = select.poll()
    gone.register(stream, select.POLLRDHUP)
    gone.poll()
    os._exit(1)


def main() -> None:
    """Become the owner, and carry out orders until there are no more.

    It ends with phosd, also in the middle: the next one may undo what it had half done.
    """
    stream, parent = socket.socket(fileno=0), os.getppid()
    known = False
    while (head := stream.recv(_LENGTH.size, socket.MSG_WAITALL)) and len(head) == _LENGTH.size:
        (size,) = _LENGTH.unpack(head)
        orders = msgspec.json.decode(stream.recv(size, socket.MSG_WAITALL), type=Orders)
        if not known and orders.uid != 0:
            become(orders.uid, orders.gid, orders.groups)
        if not known:
            Thread(target=_end_with, args=(stream,), daemon=True).start()
        if os.getppid() != parent:
            return
        known = True
        text = msgspec.json.encode(perform(orders))
        stream.sendall(_LENGTH.pack(len(text)) + text)


if __name__ == "__main__":
    main()
