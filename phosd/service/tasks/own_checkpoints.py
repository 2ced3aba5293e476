"""Take requests of programs for checkpoints of themselves (docs/reference/hook-protocol.md).

The hook in a program connects to a socket in the runtime directory. The kernel says which process
it is; it can name no other one, and what becomes of the request is decided as if its user had
called ``Checkpoint``. A hook that has no folder to listen in connects for that alone.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from phosd import unix_sockets
from phosd.engine.hook_client import places
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
from phosd.engine.system import procfs
from phosd.errors import Busy, InvalidOption, NoSuchProcess, PhosError, Unsupported
from phosd.interface.options import Then
from phosd.service.connections import accepted, readable, receive
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import OwnCheckpointRequest
from phosd.service.jobs.table import JobTable
from phosd.service.process_identity import Target, identify_peer, require_same
from phosd.service.tasks.checkpoints import Checkpoints

SOCKET = "program.sock"
MOST = 64
"""Most requests of one user in :data:`WINDOW` seconds."""
WINDOW = 10.0
CONNECTIONS = 256
"""Most connections of one user in that time. A program makes one as it starts, too."""
OPEN = 16
"""Most connections of one user at a time; each sends one request."""
KEPT = 256
"""Most requests of one user that are kept until their process knows what has come of them."""
_WAITING = 1024
"""Connections that may wait to be accepted."""
_NAME_BYTES = 63
"""Most bytes of a name."""
_TIMEOUT = 2.0
"""Seconds that a connection may take for its request."""
_AGAIN, _LONGEST = 0.2, 10.0
"""Seconds after which a process is told again that another job works on: at first, and later."""
TELL_SECONDS = 86400.0
"""Seconds for which that is tried: the process may be suspended meanwhile."""
_TRIES = 20
"""Times that a job is tried which finds another one in its way. Ranks that share memory ask at
once, and each of their jobs may hold a rank that the others need. All but the last one wait; that
one fails.
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
    then: Then
    name: str


class _Refused(Exception):
    """Nothing that the hook would send; the connection ends without an answer."""


class _Rate:
    """How often users do something: ``most`` times in :data:`WINDOW` seconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lately: dict[int, deque[float]] = defaultdict(deque)
        self._cleared = time.monotonic()

    def allows(self, uid: int) -> bool:
        """Return whether a user may do it once more, and count that if so."""
        now = time.monotonic()
        if self._cleared < now - WINDOW:
            self._cleared = now
            for user in [u for u, times in self._lately.items() if times[-1] < now - WINDOW]:
                del self._lately[user]
        times = self._lately[uid]
        while times and times[0] < now - WINDOW:
            times.popleft()
        if len(times) >= self._most:
            return False
        times.append(now)
        return True


class OwnCheckpoints:
    """Serves the socket. Use it on the event loop only. ``is_known`` says whether the last scan has
    found a process that uses a GPU; ``look`` scans again.
    """

    def __init__(
        self,
        runtime_dir: Path,
        engine: Engine,
        checkpoints: Checkpoints,
        jobs: JobTable,
        rights: Rights,
        query_pool: QueryPool,
        is_known: Callable[[Target], bool],
        look: Callable[[], Awaitable[None]],
    ) -> None:
        self._runtime_dir = runtime_dir
        self._path = runtime_dir / SOCKET
        self._engine = engine
        self._checkpoints = checkpoints
        self._jobs = jobs
        self._rights = rights
        self._query_pool = query_pool
        self._is_known = is_known
        self._look = look
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._open: Counter[int] = Counter()
        self._kept: Counter[int] = Counter()
        self._connections, self._requests = _Rate(CONNECTIONS), _Rate(MOST)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._serving = secrets.token_hex(4)
        """Part of each token: what an earlier phosd has not ended is begun again."""

    async def start(self) -> None:
        """Listen. Without the socket phosd serves all others nevertheless."""
        try:
            self._path.unlink(missing_ok=True)
            # The kernel says who connects.
            listener = unix_sockets.listening(self._path, mode=0o666, backlog=_WAITING)
        except OSError as error:
            _log.warning("programs cannot ask for checkpoints at %s: %s", self._path, error)
            return
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    async def stop_listening(self) -> None:
        """Take no further requests; a program finds that phosd is not there."""
        self._ending = True
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()  # before its descriptor gets another meaning for the loop
            await asyncio.wait([self._accepting])
            unix_sockets.stop_listening(self._listener)
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Wait until all who asked know what has come of it. The jobs must have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in accepted(listener):
            _, uid = unix_sockets.peer_of(connection)
            if self._open[uid] >= OPEN or not self._connections.allows(uid):
                unix_sockets.close(connection)
                continue
            try:
                asks: Target | PhosError = identify_peer(connection)
            except PhosError as error:
                asks = error
            self._open[uid] += 1
            self._in_background(self._serve(connection, uid, asks))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, uid: int, asks: "Target | PhosError") -> None:
        """Take the request of a process, if there is none that stands against it."""
        loop = asyncio.get_running_loop()
        try:
            self._give_place(unix_sockets.peer_of(connection)[0])
            async with asyncio.timeout(_TIMEOUT):
                sequence, wish = await _request(connection)
                try:
                    if isinstance(asks, PhosError):
                        raise asks
                    await self._admit(asks, uid, wish)
                except PhosError as error:
                    answer = _reply(sequence, Status.BUSY, _text(error))
                    await loop.sock_sendall(connection, answer)
                    return
                await loop.sock_sendall(connection, _reply(sequence, Status.OK))
            await _until_closed(connection)
            if not self._ending:  # the hook sees that the socket is gone
                self._in_background(self._save(asks, uid, wish))
        except (TimeoutError, OSError, EOFError, _Refused) as error:
            _log.debug("a process of uid %d (%s) asked for nothing: %r", uid, asks, error)
        finally:
            self._open[uid] -= 1
            self._open += Counter()  # forget who has none
            unix_sockets.close(connection)

    def _give_place(self, pid: int) -> None:
        """Make a folder for the hooks of its user; a process in a container asks elsewhere."""
        try:
            places.make_place(self._runtime_dir, pid)
        except Unsupported as error:  # one user may have many ids, and fill the log
            _log.debug("process %d gets no place for its hook's socket: %s", pid, error)
        except (OSError, PhosError) as error:
            if procfs.process_id(pid) is not None:  # who ends at once may fill the log, too
                _log.warning("process %d has no place for its hook's socket: %s", pid, error)

    async def _admit(self, asks: Target, uid: int, wish: "_Wish") -> None:
        """Raise :class:`NoSuchProcess`, :class:`InvalidOption` and :class:`Busy` for a request that
        is not kept.
        """
        if wish.name and not may_be_given(wish.name):
            raise InvalidOption(f"{wish.name!r} can be no name of an image", hint=NAMES)
        self._count(uid)
        require_same(asks)
        if not self._is_known(asks) and not await self._query_pool.run(
            uid, self._engine.is_gpu_process, asks.pid
        ):
            raise NoSuchProcess(
                f"process {asks.pid} uses no GPU", hint="ask when it has initialised CUDA"
            )

    def _count(self, uid: int) -> None:
        """Count a request. Raises :class:`Busy` if the user has made too many."""
        if self._kept[uid] >= KEPT:
            raise Busy(
                f"{KEPT} checkpoints that programs of uid {uid} have asked for are not over",
                hint="ask again when one is",
            )
        if not self._requests.allows(uid):
            raise Busy(
                f"programs of uid {uid} have asked for {MOST} checkpoints in {WINDOW:g} s",
                hint="ask less often",
            )

    async def _save(self, target: Target, uid: int, wish: "_Wish") -> None:
        """Checkpoint a process that asks for it, and tell it what has come of that."""
        self._kept[uid] += 1
        try:
            try:
                error = await self._checkpoint(target, uid, wish)
            except PhosError as refused:
                error = refused
            await self._tell(target, uid, wish, "" if error is None else _text(error))
        except PhosError as gone:
            _log.info("process %d was not told of its checkpoint: %s", target.pid, gone)
        finally:
            self._kept[uid] -= 1
            self._kept += Counter()

    async def _tell(self, target: Target, uid: int, wish: "_Wish", text: str) -> None:
        """Tell a process what has come of its request, with the threads that are its user's."""
        give_up = time.monotonic() + TELL_SECONDS
        pause = _AGAIN
        while True:
            require_same(target)
            try:
                await self._query_pool.run(
                    uid, self._engine.answer_wish, target.id, wish.number, text
                )
                return
            except Busy:  # another job works on it, which may be about to save it
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    async def _checkpoint(self, target: Target, uid: int, wish: "_Wish") -> PhosError | None:
        caller = Caller(uid, process=target.id)
        for action in (Action.CHECKPOINT, *([] if wish.then == "run" else [Action.MIGRATE])):
            acting = await self._rights.require(
                caller, action, target.uid, f"process {target.pid}", pid=str(target.pid)
            )
        if not self._is_known(target):  # else nobody could tell whose checkpoint this is
            await self._look()
        for attempt in range(_TRIES):
            asked = f"program {target.pid} {target.start_time} {wish.number} {attempt}"
            request = OwnCheckpointRequest(
                wish=wish.number,
                then=wish.then,
                name=wish.name,
                parent="auto",
                queue=True,
                token=f"{asked} {self._serving}",
            )
            job = self._checkpoints.start(target, request, uid, notes=(_NOTE,), acting=acting)
            await self._jobs.wait(job)
            stopped = any(phase.stopped for phase in job.progress.phases)
            if stopped or not isinstance(job.error, Busy):
                break
            await asyncio.sleep(random.uniform(_AGAIN, 4 * _AGAIN))
        return job.error


async def _request(connection: socket.socket) -> "tuple[int, _Wish]":
    """Return the sequence number, and what the process asks for."""
    header = HEADER.unpack(await receive(connection, HEADER.size))
    magic, version, kind, sequence, _, length, descriptors = header
    expected = (MAGIC, VERSION, Type.PROGRAM, 0)
    longest = PROGRAM_WISH.size + _NAME_BYTES
    if (magic, version, kind, descriptors) != expected or length > longest:
        raise _Refused(f"a message of type {kind} with {length} bytes")
    body = await receive(connection, length)
    if length < PROGRAM_WISH.size:
        raise _Refused(f"a wish of {length} bytes")
    number, then, name_bytes = PROGRAM_WISH.unpack_from(body)
    name = body[PROGRAM_WISH.size :]
    if not number or then >= len(THENS) or name_bytes != len(name):
        raise _Refused(f"wish {number}, then {then}, and a name of {len(name)} bytes")
    return sequence, _Wish(number, THENS[then], name.decode("ascii", "replace"))


async def _until_closed(connection: socket.socket) -> None:
    """Wait until the hook has closed the connection: the checkpoint would be refused for it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TIMEOUT):
            await readable(connection)


def _reply(sequence: int, status: Status, text: str = "") -> bytes:
    body = text.encode()[:255]
    return HEADER.pack(MAGIC, VERSION, Type.PROGRAM | REPLY, sequence, status, len(body), 0) + body


def _text(error: PhosError) -> str:
    return f"{error.code}: {error}"
