"""Take requests of programs for checkpoints of themselves (docs/reference/hook-protocol.md).

The hook in a program connects to a socket in the runtime directory. The kernel says which process
it is; it can name no other one, and what becomes of the request is decided as if its user had
called ``Checkpoint``.
"""

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.hook_client.wire import (
    HEADER,
    MAGIC,
    PROGRAM_WISH,
    REPLY,
    THENS,
    VERSION,
    Status,
    Type,
)
from phosd.engine.image.name import NAMES, may_be_given
from phosd.engine.system.sockets import peer_of
from phosd.errors import Busy, InvalidOption, NoSuchProcess, PhosError
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import OwnCheckpointRequest
from phosd.service.jobs.table import JobTable
from phosd.service.process_identity import Target, identify, require_same
from phosd.service.tasks.checkpoints import Checkpoints

SOCKET = "program.sock"
MOST = 64
"""Most requests of one user in :data:`WINDOW` seconds."""
WINDOW = 10.0
OPEN = 16
"""Most connections of one user at a time; each sends one request."""
_NAME_BYTES = 63
"""Most bytes of a name."""
_PATIENCE = 2.0
"""Seconds that a connection may take for its request."""
_AGAIN = 0.2
"""Seconds after which a process is told again that another job worked on."""
_TRIES = 20
"""Of a job that finds another one in its way. Ranks that share memory ask at once, and each of
their jobs may hold a rank that the others need. All but the last one wait; that one fails.
"""
_END_SECONDS = 10.0
"""Seconds that all who ask have to hear, when phosd ends, that there will be no image."""
_NOTE = "the program has asked for it"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Wish:
    """What a process asks for: ``number`` is its own for it, ``then`` what becomes of it, and
    ``name`` that of the image (empty: its program's).
    """

    number: int
    then: str
    name: str


class _Refused(Exception):
    """Nothing that the hook would send; the connection ends without an answer."""


class OwnCheckpoints:
    """Serves the socket. Use it on the event loop only."""

    def __init__(
        self,
        runtime_dir: Path,
        engine: Engine,
        checkpoints: Checkpoints,
        jobs: JobTable,
        rights: Rights,
    ) -> None:
        self._path = runtime_dir / SOCKET
        self._engine = engine
        self._checkpoints = checkpoints
        self._jobs = jobs
        self._rights = rights
        self._server: asyncio.Server | None = None
        self._open: dict[int, int] = defaultdict(int)
        self._lately: dict[int, deque[float]] = defaultdict(deque)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False

    async def start(self) -> None:
        """Listen. Without the socket phosd serves all others nevertheless."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            self._path.chmod(0o666)  # who connects is what the kernel says
            self._server = await asyncio.start_unix_server(self._serve, sock=listener)
        except OSError as error:
            listener.close()
            _log.warning("programs cannot ask for checkpoints at %s: %s", self._path, error)

    async def stop_listening(self) -> None:
        """Take no further requests; a program finds that phosd is not there."""
        self._ending = True
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Wait until all who asked know what has come of it. The jobs must have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        pid, uid = peer_of(connection)
        self._open[uid] += 1
        try:
            if self._open[uid] > OPEN:
                return
            async with asyncio.timeout(_PATIENCE):
                sequence, wish = await _request(reader)
                try:
                    target = self._admit(pid, uid, wish)
                except PhosError as error:
                    writer.write(_reply(sequence, Status.BUSY, _text(error)))
                    return
                writer.write(_reply(sequence, Status.OK))
            await _until_closed(reader)
            self._begin(target, uid, wish)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, _Refused) as error:
            _log.debug("process %d (uid %d) asked for nothing: %r", pid, uid, error)
        finally:
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _admit(self, pid: int, uid: int, wish: "_Wish") -> Target:
        """Return the process that asks. Raises :class:`NoSuchProcess`, :class:`InvalidOption` and
        :class:`Busy`.
        """
        if pid == 0:
            raise NoSuchProcess(
                "phosd does not see the process that asks",
                hint="it is in a pid namespace that is not below phosd's",
            )
        target = identify(pid)
        if wish.name and not may_be_given(wish.name):
            raise InvalidOption(f"{wish.name!r} can be no name of an image", hint=NAMES)
        now = time.monotonic()
        for user in [user for user, times in self._lately.items() if times[-1] < now - WINDOW]:
            del self._lately[user]
        times = self._lately[uid]
        while times and times[0] < now - WINDOW:
            times.popleft()
        if len(times) >= MOST:
            raise Busy(
                f"programs of uid {uid} have asked for {MOST} checkpoints in {WINDOW:g} s",
                hint="ask less often",
            )
        times.append(now)
        return target

    def _begin(self, target: Target, uid: int, wish: "_Wish") -> None:
        if self._ending:  # the hook sees that the socket is gone
            return
        task = asyncio.get_running_loop().create_task(self._save(target, uid, wish))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, target: Target, uid: int, wish: "_Wish") -> None:
        """Checkpoint a process that asks for it, and tell it what has come of that."""
        try:
            error = await self._checkpoint(target, uid, wish)
        except PhosError as refused:
            error = refused
        text = "" if error is None else _text(error)
        while True:
            try:
                require_same(target)
                await asyncio.to_thread(self._engine.answer_wish, target.id, wish.number, text)
                return
            except Busy:  # another job works on it, which may be about to save it
                await asyncio.sleep(_AGAIN)
            except PhosError as gone:
                _log.info("process %d was not told of its checkpoint: %s", target.pid, gone)
                return

    async def _checkpoint(self, target: Target, uid: int, wish: "_Wish") -> PhosError | None:
        caller = Caller(uid, process=target.id)
        for action in (Action.CHECKPOINT, *([] if wish.then == "run" else [Action.MIGRATE])):
            acting = await self._rights.require(
                caller, action, target.uid, f"process {target.pid}", pid=str(target.pid)
            )
        for attempt in range(_TRIES):
            token = f"program {target.pid} {target.start_time} {wish.number} {attempt}"
            request = OwnCheckpointRequest(
                wish=wish.number,
                then=wish.then,
                name=wish.name,
                parent="auto",
                queue=True,
                token=token,
            )
            job = self._checkpoints.start(target, request, uid, notes=(_NOTE,), acting=acting)
            await self._jobs.wait(job)
            stopped = any(phase.stopped for phase in job.progress.phases)
            if stopped or not isinstance(job.error, Busy):
                break
            await asyncio.sleep(random.uniform(_AGAIN, 4 * _AGAIN))
        return job.error


async def _request(reader: asyncio.StreamReader) -> "tuple[int, _Wish]":
    """Return the sequence number, and what the process asks for."""
    header = HEADER.unpack(await reader.readexactly(HEADER.size))
    magic, version, kind, sequence, _, length, descriptors = header
    expected = (MAGIC, VERSION, Type.PROGRAM, 0)
    longest = PROGRAM_WISH.size + _NAME_BYTES
    if (magic, version, kind, descriptors) != expected or length > longest:
        raise _Refused(f"a message of type {kind} with {length} bytes")
    body = await reader.readexactly(length)
    if length < PROGRAM_WISH.size:
        raise _Refused(f"a wish of {length} bytes")
    number, then, name_bytes = PROGRAM_WISH.unpack_from(body)
    name = body[PROGRAM_WISH.size :]
    if not number or then >= len(THENS) or name_bytes != len(name):
        raise _Refused(f"wish {number}, then {then}, and a name of {len(name)} bytes")
    return sequence, _Wish(number, THENS[then], name.decode("ascii", "replace"))


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Wait until the hook has closed the connection: the checkpoint would be refused for it."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(_PATIENCE):
            await reader.read(1)


def _reply(sequence: int, status: Status, text: str = "") -> bytes:
    body = text.encode()[:255]
    return HEADER.pack(MAGIC, VERSION, Type.PROGRAM | REPLY, sequence, status, len(body), 0) + body


def _text(error: PhosError) -> str:
    return f"{error.code}: {error}"
