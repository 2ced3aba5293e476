"""Send requests to the hook in a GPU process (docs/reference/hook-protocol.md)."""

import errno
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from phosd.engine.hook_client.answers import (
    Garbled,
    GateState,
    Hello,
    HookBlock,
    Kernel,
    LaunchedKernel,
    ProgramState,
    ReleaseState,
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
from phosd.engine.hook_client.channel import NotImportable, close_all
from phosd.engine.hook_client.code_images import MAX_IMAGES, CodeImage, decode_images
from phosd.engine.hook_client.connection import WAKE_SECONDS, HookConnection
from phosd.engine.hook_client.wire import (
    ARM,
    CLOSE_GATE,
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
    HookState,
    ProgramOutcome,
    Release,
    Type,
)
from phosd.errors import Internal, NoSuchProcess, Reason, Unsupported

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
_CLOSES = 1.0
"""Seconds that a hook may take to close its end, on a busy machine, too."""
LONGEST_WAIT = 0.002
"""Seconds that a hook may wait for the program's rest before it answers, at most."""


class HookLink(HookConnection):
    """A connection to the hook of one process, with one request at a time.

    Each request may take ``deadline`` seconds; a list may take that in total.
    """

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
        """Ask the process to make memory of its own for parked blocks, with any bytes in it.

        Returns their descriptors, which the caller fills and closes. Raises :class:`OutOfMemory`.
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
        """Ask the hook to release the chunk map."""
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
        """Ask PyTorch in the process to release its cache, on the program's main thread.

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
        """Let the threads at a safe point go on to the next one."""
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
        """Return whether the process may look at another running process of its user."""
        return self._count(Type.MAY_SEE, U64.pack(pid)) != errno.EACCES

    def unfinished(self) -> float:
        """Return for how many seconds work is awaited that was submitted before the gate began to
        close, also once it is open; 0: for none, or the hook is older and does not tell.

        Asked on a connection of its own, which an older hook closes then.
        """
        try:
            with HookLink(self.pid, self.runtime_dir) as other:
                return other._count(Type.UNFINISHED) / 1000
        except Internal:
            return 0.0

    def launch_count(self, count_seconds: int = 0) -> float:
        """Return how many kernels were launched since they are counted, which goes on for so long;
        infinitely many if the hook is older and does not tell.

        Asked on a connection of its own, which an older hook closes then.
        """
        try:
            with HookLink(self.pid, self.runtime_dir) as other:
                return sum(kernel.launches for kernel in other.launches(count_seconds))
        except Internal:
            return math.inf

    def detach(self) -> None:
        """Ask the hook to close its sockets until :meth:`reattach`; the connection ends.

        The hook closes its end after it has answered, and until then a runtime's CRIU would refuse
        the process for it.
        """
        self._ask(Type.DETACH)
        self._await_end(_CLOSES)
        self.close()

    def stats(self) -> str:
        """Return the hook's counters and its log ring, as text."""
        return printable(self._ask(Type.STATS))

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
