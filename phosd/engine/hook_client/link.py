"""Send requests to the hook in a GPU process (docs/reference/hook-protocol.md)."""

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from phosd.engine.hook_client.code_images import MAX_IMAGES, CodeImage, decode_images
from phosd.engine.hook_client.places import HookSocket, hook_socket
from phosd.engine.hook_client.received import is_distrusted
from phosd.engine.hook_client.wire import (
    ARM,
    CLOSE_GATE,
    DEADLINE,
    EMPTY_CACHE,
    LAUNCHES_ASK,
    MAX_BLOCKS,
    MAX_DESCRIPTORS,
    MAX_EXPORTED,
    MAX_KERNELS,
    PROGRAM_ASK,
    U64,
    Ask,
    BlockFlag,
    Channel,
    Garbled,
    GateState,
    Hello,
    HookBlock,
    HookState,
    Kernel,
    LaunchedKernel,
    NotImportable,
    ProgramOutcome,
    ProgramState,
    Release,
    ReleaseState,
    Type,
    close_all,
    decode_blocks,
    decode_gate,
    decode_hello,
    decode_kernels,
    decode_launches,
    decode_program,
    decode_release,
    printable,
    unpack,
)
from phosd.engine.system import procfs, standstill
from phosd.engine.system.sockets import peer_of
from phosd.errors import Busy, Internal, NoSuchProcess, NotAuthorized, Reason, Timeout, Unsupported

__all__ = [
    "MAX_DESCRIPTORS",
    "WAKE_SECONDS",
    "BlockFlag",
    "GateState",
    "Hello",
    "HookBlock",
    "HookLink",
    "HookState",
    "Kernel",
    "LaunchedKernel",
    "NotImportable",
    "ProgramOutcome",
    "ProgramState",
    "Release",
    "ReleaseState",
    "reach",
]

_Row = TypeVar("_Row")

_MAX_MS = (1 << 32) - 1
LONGEST_WAIT = 0.002
"""Seconds that a hook may wait for the program's rest before it answers, at most."""
WAKE_SECONDS = 10.0
"""Seconds that a detached hook has to come back."""


class HookLink:
    """A connection to the hook of one process, with one request at a time.

    Each request may take ``deadline`` seconds; a list may take that in total.
    """

    def __init__(self, pid: int, runtime_dir: Path, deadline: float = DEADLINE) -> None:
        self.pid = pid
        self.runtime_dir = runtime_dir
        self._deadline = deadline
        self._owner = -1
        self._channel: Channel | None = None

    def connect(self) -> Self:
        """Connect, and check that the peer is the process: any user can write to the folder.

        Raises :class:`NoSuchProcess` if no hook listens for the pid, :class:`NotAuthorized` if
        another process does, :class:`Timeout` if the hook does not accept the connection.
        """
        with hook_socket(self.runtime_dir, self.pid) as place:
            try:
                owner = self._owner = procfs.status(self.pid).uids[1]
                fitting = place.is_of(owner)
            except (FileNotFoundError, ProcessLookupError) as error:
                raise NoSuchProcess(
                    f"process {self.pid} has no hook (no {place})",
                    hint="start it with `phos run`, or use mode driver",
                ) from error
            if is_distrusted(owner):
                raise NotAuthorized(
                    f"a hook of user {owner} has sent files or sockets instead of memory",
                    hint="phosd talks to no hook of that user any more, until it is restarted",
                )
            if not fitting:
                raise NotAuthorized(
                    f"{place} is not a socket of the owner of process {self.pid}",
                    hint="somebody else put it there; remove it",
                )
            self._channel = Channel(self.pid, owner, self._connected(place, owner))
        return self

    def _connected(self, place: HookSocket, owner: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(self._deadline)
        try:
            place.connect(connection)
            peer_pid, peer_uid = peer_of(connection)
            if (peer_pid, peer_uid) != (self.pid, owner):
                raise NotAuthorized(
                    f"{place} is served by process {peer_pid} (uid {peer_uid}), not {self.pid}",
                    hint="somebody else put it there; remove it",
                )
        except (BlockingIOError, TimeoutError) as error:  # the hook's queue of connections is full
            connection.close()
            raise Timeout(
                f"the hook of process {self.pid} takes no connection",
                hint="the process may be stopped, or others are at work on it; try again",
            ) from error
        except OSError as error:
            connection.close()
            raise NoSuchProcess(
                f"the hook of process {self.pid} does not answer ({error.strerror or error})",
                hint="use mode driver",
            ) from error
        except NotAuthorized:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connection. A closed gate opens with it, unless memory is parked."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection; a failed request ends it."""
        return self._channel is not None and not self._channel.closed

    def __enter__(self) -> Self:
        return self if self.connected else self.connect()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """Return the description of the process, and whether it can be parked."""
        with self._decoding(Type.HELLO):
            return decode_hello(self._ask(Type.HELLO))

    def list_blocks(self, after: int = 0) -> list[HookBlock]:
        """Return every block with an id above ``after``, ordered by id."""
        return [block for block, _ in self._blocks(Type.LIST_BLOCKS, after)]

    def export_blocks(
        self, after: int = 0, most: int = MAX_EXPORTED
    ) -> Iterator[tuple[HookBlock, int | None]]:
        """Yield the same with a descriptor each (for the caller to close), or None.

        Raises :class:`Unsupported` if there are more than ``most``.
        """
        return self._blocks(Type.EXPORT_BLOCKS, after, most)

    def has_imports(self) -> bool:
        """Return whether blocks are imports that cannot be exported again (:meth:`rehome`)."""
        return any(not b.flags & BlockFlag.HAS_DESCRIPTOR for b in self.list_blocks())

    def close_gate(
        self, deadline: float, *, wait: float = LONGEST_WAIT, for_peers: int = 0
    ) -> GateState:
        """Begin to close the gate, or ask for its state. ``deadline`` in seconds.

        ``wait``: the seconds that the hook may wait for the program's rest before it answers.
        ``for_peers``: not 0 while another process of the group is busy, which may wait for what
        this one is to submit; so many submissions are let through, and the gate does not settle.
        """
        milliseconds = max(0, min(int(deadline * 1000), _MAX_MS))
        request = CLOSE_GATE.pack(milliseconds, int(wait * 1_000_000), for_peers)
        with self._decoding(Type.CLOSE_GATE):
            return decode_gate(self._ask(Type.CLOSE_GATE, request))

    def seal_gate(self) -> int:
        """Hold also the calls that submit nothing. Returns how many threads are still in one."""
        return self._count(Type.SEAL_GATE)

    def open_gate(self) -> None:
        """Open the gate, so that the program works again."""
        self._ask(Type.OPEN_GATE)

    def park(self) -> int:
        """Unmap and release every block. Returns their number."""
        return self._count(Type.PARK)

    def unpark(self, memory: Iterable[tuple[int, int]]) -> int:
        """Hand back each block as ``(block id, descriptor)``, and map all. Returns their number.

        Raises :class:`NotImportable` if the driver does not import one: see :meth:`make`.
        """
        batch: list[tuple[int, int]] = []
        for item in memory:
            batch.append(item)
            if len(batch) == MAX_DESCRIPTORS:
                self._hand_back(batch)
                batch = []
        if batch:
            self._hand_back(batch)
        return self._count(Type.UNPARK)

    def away(self) -> set[int]:
        """Return the ids of the parked blocks that were not handed back."""
        return {block.id for block in self.list_blocks() if block.flags & BlockFlag.AWAY}

    def make(self, ids: Sequence[int]) -> list[int]:
        """Have the process make memory of its own for parked blocks, with any bytes in it. Returns
        their descriptors, which the caller fills and closes. Raises :class:`OutOfMemory`.
        """
        body, descriptors = self._request(Type.MAKE_BLOCKS, _ids(ids))
        try:
            with self._decoding(Type.MAKE_BLOCKS):
                if unpack(U64, body) != (len(ids),) or len(descriptors) != len(ids):
                    raise Garbled(f"{len(descriptors)} descriptors for {len(ids)} blocks")
        except BaseException:
            close_all(descriptors)
            raise
        return descriptors

    def filled(self, ids: Sequence[int], *, renewed: bool = False) -> int:
        """Hand back blocks that were made and have their bytes. Returns their number. ``renewed``:
        whoever holds the memory that they had must not take it for theirs; they get other ids.
        """
        return self._count(Type.BLOCKS_RENEWED if renewed else Type.BLOCKS_FILLED, _ids(ids))

    def rehome(self, ids: Sequence[int] | None = None) -> int:
        """Copy imported blocks into memory that the process owns. Returns their number.

        ``ids`` limits this to some blocks (at most 8,000).
        """
        return self._count(Type.REHOME, b"" if ids is None else _ids(ids))

    def arm(self, chunk_map: int, slabs: Sequence[int]) -> int:
        """Begin copy-on-write with the descriptors of a chunk map and of its slabs.

        Returns the number of pending chunks. The gate must be closed, except for a chunk map that
        is only watched. Losing this connection ends copy-on-write.
        """
        return self._count(Type.ARM, ARM.pack(len(slabs), 0), [chunk_map, *slabs])

    def disarm(self) -> int:
        """End copy-on-write. Returns the number of chunks that the hook shadowed.

        The hook releases the slabs, and goes on posting freed blocks on the chunk map.
        """
        return self._count(Type.DISARM)

    def forget(self) -> None:
        """Have the hook release the chunk map."""
        self._ask(Type.FORGET)

    def kernels(self) -> list[Kernel]:
        """Return the kernels launched since :meth:`arm`, by first launch."""
        return self._listed(Type.KERNELS, decode_kernels, MAX_KERNELS)

    def launches(self, count_seconds: int = 0) -> list[LaunchedKernel]:
        """Return the kernels launched since :meth:`arm`, or since launches are counted, with what
        is known of their launches. ``count_seconds``: go on counting for so long, also while
        nothing is armed, which costs the program some time at each launch.

        A hook that is too old for this ends the connection; :class:`Internal`.
        """

        def ask(known: int) -> bytes:
            return LAUNCHES_ASK.pack(known, count_seconds, 0)

        return self._listed(Type.LAUNCHES, decode_launches, MAX_KERNELS, ask=ask)

    def images(self, after: int = 0) -> list[CodeImage]:
        """Return the images that kernels were loaded from, without the first ones. A hook that is
        too old for this ends the connection; :class:`Internal`.
        """
        return self._listed(Type.IMAGES, decode_images, MAX_IMAGES, after)

    def give_summaries(self, table: int) -> int:
        """Give the hook a file with a table of what a module's kernels access
        (``analysis.table``), in place of the one that it may have of the module. Returns how many
        kernels the table has.

        Raises :class:`Unsupported` if the hook does not take it: the table is of another version,
        or for another architecture. A hook that is too old for this ends the connection;
        :class:`Internal`.
        """
        try:
            return self._count(Type.SUMMARIES, descriptors=[table])
        except Unsupported as error:
            raise Unsupported(
                error.what,
                hint="the module's kernels count as writing through each of their pointers; a "
                "program that is started anew has the hook of this phosd",
                reason="refused-table",
            ) from error

    def _listed(
        self,
        request: Type,
        decode: Callable[[bytes], tuple[list[_Row], bool]],
        most: int,
        after: int = 0,
        ask: Callable[[int], bytes] = U64.pack,
    ) -> list[_Row]:
        """Return a list that comes in parts, without the first ones."""
        known: list[_Row] = []
        more = True
        until = time.monotonic() + self._deadline
        while more:
            with self._decoding(request):
                new, more = decode(self._ask(request, ask(after + len(known)), until=until))
                known += new
                if after + len(known) > most:
                    raise Garbled(f"more than {most} {request.name.lower()}")
        return known

    def empty_cache(self, *, ask: bool, until: float | None = None) -> ReleaseState:
        """Have PyTorch in the process release its cache, on the program's main thread.

        Without ``ask``, only return the state of an earlier request. The gate must be open.
        ``until`` is the deadline of the answer, on the monotonic clock.
        """
        with self._decoding(Type.EMPTY_CACHE):
            return decode_release(
                self._ask(Type.EMPTY_CACHE, EMPTY_CACHE.pack(ask, 0), until=until)
            )

    def program(self, *, want: bool = False) -> ProgramState:
        """Return what the program says of its safe points and of the checkpoint that it asks for.

        ``want``: wait for a safe point, until this connection ends. A hook that is too old for this
        ends the connection; :class:`Internal`.
        """
        return self._program(Ask.WANT if want else Ask.LOOK)

    def pass_safe_point(self) -> ProgramState:
        """Have the threads at a safe point go on to the next one."""
        return self._program(Ask.PASS)

    def answer_program(
        self, outcome: ProgramOutcome, *, wish: int = 0, then: int = 0, text: str = ""
    ) -> ProgramState:
        """Tell the threads that wait for a checkpoint what has come of it: of the ``wish``, or,
        without one, of all that the image with ``then`` has, if they ask for the name in ``text``.
        """
        return self._program(Ask.ANSWER, outcome, then, wish, text.encode()[:255])

    def _program(
        self,
        ask: Ask,
        outcome: ProgramOutcome = ProgramOutcome.NOTHING,
        then: int = 0,
        wish: int = 0,
        text: bytes = b"",
    ) -> ProgramState:
        with self._decoding(Type.PROGRAM):
            payload = PROGRAM_ASK.pack(ask, outcome, then, 0, wish, text)
            return decode_program(self._ask(Type.PROGRAM, payload))

    def may_see(self, pid: int) -> bool:
        """Return whether the process may look at another one of its user's, which runs."""
        return self._count(Type.MAY_SEE, U64.pack(pid)) != errno.EACCES

    def detach(self) -> None:
        """Have the hook close its sockets until :meth:`reattach`; the connection ends."""
        self._ask(Type.DETACH)
        self.close()

    def stats(self) -> str:
        """Return the hook's counters and its log ring, as text."""
        return printable(self._ask(Type.STATS))

    def reattach(self, deadline: float = DEADLINE) -> None:
        """Wake a detached hook and connect to it again.

        Raises :class:`Timeout` if it does not come back within ``deadline`` seconds, or its process
        is stopped.
        """
        with hook_socket(self.runtime_dir, self.pid) as place, place.waking():
            self._await(place, deadline)

    def _await(self, place: HookSocket, deadline: float) -> None:
        give_up = time.monotonic() + deadline
        look = time.monotonic() + standstill.LOOK_SECONDS
        while True:
            try:
                self.connect()
                return
            except (NoSuchProcess, Timeout) as error:  # not listening yet
                why = error.what
            except NotAuthorized as error:  # a file in its place: the hook cannot listen there
                if is_distrusted(self._owner):
                    raise
                why = error.what
                self._clear_the_way(place)
            found = procfs.stat(self.pid)
            if found is None or found.dead:
                raise NoSuchProcess(
                    f"process {self.pid} ended before its hook came back",
                    hint="see its output for the reason",
                )
            try:
                if time.monotonic() > look:
                    look = time.monotonic() + standstill.LOOK_SECONDS
                    standstill.require_going(self.pid)
            except Busy as stopped:
                raise Timeout(
                    f"the hook of process {self.pid} did not come back: {stopped.what}",
                    hint=stopped.hint,
                ) from stopped
            if time.monotonic() > give_up:
                raise Timeout(
                    f"the hook of process {self.pid} did not come back in {deadline:.0f} s ({why})",
                    hint="the process may be stopped or wedged; see `phos doctor`",
                )
            time.sleep(0.0005)

    def _clear_the_way(self, place: HookSocket) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            place.clear_the_way(procfs.status(self.pid).uids[1])

    # -- the parts of a request ----------------------------------------------------------------

    def _blocks(
        self, type_: Type, after: int, most: int = 0
    ) -> Iterator[tuple[HookBlock, int | None]]:
        until = time.monotonic() + self._deadline
        found, exported, more = 0, 0, True
        while more:
            body, descriptors = self._request(type_, U64.pack(after), until=until)
            try:
                with self._decoding(type_):
                    blocks, more = decode_blocks(body, after)
                    found += len(blocks)
                    if found > MAX_BLOCKS:
                        raise Garbled(f"more than {MAX_BLOCKS} blocks")
                    holders = [b.id for b in blocks if b.flags & BlockFlag.HAS_DESCRIPTOR]
                    if type_ is Type.LIST_BLOCKS:
                        holders = []
                    if len(holders) != len(descriptors):
                        raise Garbled(f"{len(descriptors)} descriptors for {len(holders)} blocks")
                exported += len(holders)
                if exported > most:
                    raise Unsupported(
                        f"process {self.pid} has more than {most} blocks of device memory",
                        hint="allocate in larger pieces, or use mode driver",
                        reason=Reason.TOO_MANY_BLOCKS,
                    )
                for block in blocks:
                    mine = block.id in holders
                    yield block, descriptors.pop(0) if mine else None
                    after = block.id
            finally:
                close_all(descriptors)  # those that the caller did not take

    def _hand_back(self, batch: Sequence[tuple[int, int]]) -> None:
        self._ask(Type.UNPARK_BLOCKS, _ids([i for i, _ in batch]), [fd for _, fd in batch])

    def _count(self, type_: Type, payload: bytes = b"", descriptors: Sequence[int] = ()) -> int:
        with self._decoding(type_):
            return int(unpack(U64, self._ask(type_, payload, descriptors))[0])

    def _ask(
        self,
        type_: Type,
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        until: float | None = None,
    ) -> bytes:
        """Send a request whose answer has no descriptors."""
        return self._request(type_, payload, descriptors, until)[0]

    def _request(
        self,
        type_: Type,
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        until: float | None = None,
    ) -> tuple[bytes, list[int]]:
        """Send a request. ``until``: its deadline on the monotonic clock, if not the default."""
        if self._channel is None:
            raise Internal(
                f"no connection to the hook of process {self.pid}", hint="connect it first"
            )
        if self._channel.closed:  # after a failed request
            raise NoSuchProcess(
                f"the connection to the hook of process {self.pid} was lost",
                hint="the process may have ended; try again",
            )
        patience = self._deadline if until is None else max(0.0, until - time.monotonic())
        return self._channel.request(type_, payload, descriptors, patience)

    @contextlib.contextmanager
    def _decoding(self, type_: Type) -> Iterator[None]:
        """End the connection if an answer cannot be decoded inside."""
        try:
            yield
        except Garbled as error:
            assert self._channel is not None
            raise self._channel.broken(f"{error} as an answer to {type_.name}") from None


def _ids(ids: Sequence[int]) -> bytes:
    """Return ``BlockIds`` of wire.h."""
    return struct.pack(f"<{len(ids) + 1}Q", len(ids), *ids)


def reach(pid: int, runtime_dir: Path, patience: float = WAKE_SECONDS) -> HookLink:
    """Connect to the hook in a process, and wake it if it is detached.

    Raises :class:`Timeout` if it does not come back within ``patience`` seconds.
    """
    link = HookLink(pid, runtime_dir)
    try:
        return link.connect()
    except NoSuchProcess:
        link.reattach(patience)
        return link
