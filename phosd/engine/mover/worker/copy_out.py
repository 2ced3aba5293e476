"""Copy chunks of device memory into packs, hashing every byte on the way.

A chunk is copied to a staging slot in device memory and hashed there, and those very bytes go
through the pinned ring into the pack. Batches are staged and hashed as far ahead as there are
slots: beside a program that computes all the time, the mover gets the device only every few
milliseconds. Several streams alternate, because the program is stopped while the mover has the
device, and one batch keeps only a tenth of the device busy with hashing. Two streams alternate on
the bus, which is free meanwhile. As many threads write as keep a fast disk or a tmpfs busy.

Memory that was hashed and that no other process can write is copied out from where it is. That
takes only the copy engines, and costs a program beside it next to nothing. So is memory of programs
that run and whose kernels the GPU does not interrupt (hazard 47): the CPU hashes it in the pack.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any, NamedTuple, Self

from phosd.engine.digest import SIZE, digest_ranges, split
from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import HEADER, RECORD, header_fields, record_size
from phosd.engine.image.private_files import space_errors
from phosd.engine.mover.protocol.wire import Packs
from phosd.engine.mover.worker.pinned_packs import pack_file
from phosd.engine.mover.worker.ring import Slot
from phosd.engine.mover.worker.transfer import (
    Transfer,
    WorkerPool,
    close_all,
    copy_rows,
    reopen_direct,
    runs,
)
from phosd.engine.mover.worker.window_copy import WindowedPack
from phosd.engine.system.cuda import call
from phosd.errors import OutOfSpace

_WRITERS = max(4, min(16, os.cpu_count() or 1))
_STAGERS = 8
_ENTRY = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a block, and the device address of its bytes."""

    key: int
    index: int
    address: int
    length: int


class Item(NamedTuple):
    """A chunk with the place of its record in the slot and in a pack."""

    chunk: Chunk
    slot_offset: int
    pack: int
    """Index of the pack in the request."""
    offset: int


class _Run(NamedTuple):
    """Consecutive records in a slot and in a pack, copied in one transfer."""

    slot_offset: int
    pack: int
    offset: int
    size: int
    records: int


class _Move(NamedTuple):
    """The host memory that a run is copied to: the slot, or the pack itself."""

    run: _Run
    address: int
    view: memoryview
    in_pack: bool


class _Work(NamedTuple):
    """A batch in flight. ``proven``: its digests, if they are known. ``left`` is called when it has
    left the device.
    """

    slot: Slot
    items: Sequence[Item]
    moves: Sequence[_Move]
    proven: Sequence[bytes] | None = None
    left: "OnLeft | None" = None
    staged: bool = False
    """Whether what goes through the ring is still in the staging slot."""


@dataclass
class _Stripe:
    """A pack being filled; ``pack`` is its index in the request."""

    pack: int
    capacity: int
    offset: int = 0


class Stripes:
    """Fill several packs in parallel, as file systems let one thread at a time write a file.

    ``used``: bytes that are taken at the beginning of each pack; empty for none.
    """

    def __init__(self, packs: Packs, used: Sequence[int] = ()) -> None:
        taken = used or [0] * len(packs.packs)
        self._stripes = deque(
            _Stripe(i, capacity, start)
            for i, ((_, capacity), start) in enumerate(zip(packs.packs, taken, strict=True))
        )

    def next(self, most: int) -> tuple[_Stripe, int]:
        """Return the next pack in turn, and the number of chunks that it takes, up to ``most``."""
        while self._stripes:
            stripe = self._stripes.popleft()
            if room := min(most, (stripe.capacity - stripe.offset) // RECORD):
                self._stripes.append(stripe)
                return stripe, room
        raise OutOfSpace("the packs of the image are full", hint="give the mover more packs")


def fill(stripe: _Stripe, chunks: Iterable[Chunk]) -> list[Item]:
    """Assign the next records of a pack to chunks."""
    items = []
    at = 0
    for chunk in chunks:
        items.append(Item(chunk, at, stripe.pack, stripe.offset))
        at += record_size(chunk.length)
        stripe.offset += record_size(chunk.length)
    return items


OnCopied = Callable[[Sequence[Item], Sequence[bytes]], None]
"""Called with chunks that were just saved and their digests, on any thread."""


OnLeft = Callable[[Sequence[Item]], None]
"""Called with chunks that have left the device, on any thread."""


class CopyOut:
    """The pipeline of one request: :meth:`put` starts batches; the end of the context awaits them.

    The device writes directly into pinned packs; others get their bytes through the ring.
    ``descriptors`` are those of the packs, open for writing. ``by_copy_engines``: run no kernel on
    the GPU, hash by the CPU. Raises :class:`OutOfSpace` if the disk is full, and
    :class:`Cancelled`.
    """

    def __init__(
        self,
        transfer: Transfer,
        packs: Packs,
        descriptors: Sequence[int],
        copied: OnCopied,
        *,
        by_copy_engines: bool = False,
    ) -> None:
        self._by_copy_engines = by_copy_engines
        self._transfer = transfer
        self._gpu = transfer.gpu
        self._ring = transfer.ring
        self._packs = packs
        self._files = [pack_file(fd) for fd in descriptors]
        self._buffered = descriptors
        self._copied = copied
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._direct = [reopen_direct(fd, os.O_WRONLY) for fd in self._buffered]
            stack.callback(close_all, self._direct)
            lent = self._gpu.streams.lent
            self._stagers = cycle(stack.enter_context(lent(_STAGERS)))
            self._all_buses = stack.enter_context(lent(2))
            self._buses = cycle(self._all_buses)
            self._workers = stack.enter_context(WorkerPool(self._transfer, _WRITERS))
            self._watcher = stack.enter_context(WorkerPool(self._transfer, 1))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def check(self) -> None:
        """Raise :class:`Cancelled` if the request was cancelled or a batch has failed."""
        self._workers.check()
        self._watcher.check()

    def put(
        self, slot: Slot, items: Sequence[Item], left: Callable[[], None] | None = None
    ) -> None:
        """Start copying chunks through a slot, which is freed when they are written.

        ``left`` is called on another thread once they have left the device; it waits for no writer.
        """
        if self._by_copy_engines:
            work = self._straight(slot, items)
        else:
            work = self._staged(slot, items, stay=left is None)
        if left is None:
            self._workers.submit(self._finish, work)
        else:
            self._watcher.submit(self._await_left, (work, left))

    def wait_left(self) -> None:
        """Wait until all chunks of all batches have left the device."""
        for bus in self._all_buses:
            call("cuStreamSynchronize", bus)

    def put_proven(
        self, slot: Slot, items: Sequence[Item], digests: Sequence[bytes], left: OnLeft
    ) -> None:
        """Start copying chunks with known digests that no other process can write."""
        work = self._straight(slot, items)._replace(proven=digests, left=left)
        self._workers.submit(self._finish, work)

    def _staged(self, slot: Slot, items: Sequence[Item], *, stay: bool) -> _Work:
        """Start copying chunks to the staging slot, hashing them there, and on to the host. With
        ``stay`` those for packs that are not pinned stay there until they are written.
        """
        bus, stager = next(self._buses), next(self._stagers)
        with self._starting(slot, bus, stager):
            self._stage(slot, items, stager)
            moves = self._moves(slot, items)
            call("cuStreamWaitEvent", bus, slot.staged, 0)
            for run, address, _, in_pack in moves:
                if in_pack or not stay:
                    source = slot.staging + run.slot_offset
                    call("cuMemcpyDtoHAsync", address, source, run.size, bus)
            call("cuStreamWaitEvent", bus, slot.hashed, 0)
            call("cuEventRecord", slot.event, bus)
        return _Work(slot, items, moves, staged=stay)

    def _straight(self, slot: Slot, items: Sequence[Item]) -> _Work:
        """Start copying chunks from where they are to the host, by the copy engines alone."""
        bus = next(self._buses)
        with self._starting(slot, bus):
            moves = self._moves(slot, items)
            each = iter(items)
            for run, address, _, _ in moves:
                at = address + HEADER - run.slot_offset
                part = islice(each, run.records)
                places = ((i.chunk.address, at + i.slot_offset, i.chunk.length) for i in part)
                for source, target, length, rows in runs(places):
                    sides = (("host", target, RECORD), ("device", source, CHUNK))
                    copy_rows(*sides, length, rows, bus)
            call("cuEventRecord", slot.event, bus)
        return _Work(slot, items, moves)

    @contextmanager
    def _starting(self, slot: Slot, *used: Any) -> Iterator[None]:
        """Use streams inside; on failure wait until they are idle, and free the slot."""
        try:
            self.check()
            point(Point.MOVER_COPY_OUT)
            yield
        except BaseException:
            for stream in used:
                call("cuStreamSynchronize", stream)
            self._ring.give(slot)
            raise

    def _stage(self, slot: Slot, items: Sequence[Item], stager: Any) -> None:
        """Copy chunks from device memory to the staging slot, and hash them there."""
        places = ((i.chunk.address, HEADER + i.slot_offset, i.chunk.length) for i in items)
        for address, offset, length, rows in runs(places):
            target = ("device", slot.staging + offset, RECORD)
            copy_rows(target, ("device", address, CHUNK), length, rows, stager)
        call("cuEventRecord", slot.staged, stager)
        for n, item in enumerate(items):
            bytes_at = slot.staging + HEADER + item.slot_offset
            _ENTRY.pack_into(slot.entries, n * _ENTRY.size, bytes_at, item.chunk.length)
        self._gpu.launch_digest(stager, slot.table, len(items), slot.results)
        call("cuEventRecord", slot.hashed, stager)

    def _await_left(self, work: tuple[_Work, Callable[[], None]]) -> None:
        batch, left = work
        try:
            call("cuEventSynchronize", batch.slot.event, about="a copy of device memory")
            left()
        except BaseException:
            self._ring.give(batch.slot)
            raise
        self._workers.submit(self._finish, batch)

    def _finish(self, work: _Work) -> None:
        slot, items = work.slot, work.items
        try:
            call("cuEventSynchronize", slot.event, about="a copy out of device memory")
            if work.left is not None:
                work.left(items)
            self.check()
            digests = work.proven or self._digests(slot, items, work.moves)
            left = zip(items, digests, strict=True)
            for move in work.moves:
                self._save(move, [*islice(left, move.run.records)], slot if work.staged else None)
            self._copied(items, digests)
            self._transfer.report(sum(item.chunk.length for item in items))
        finally:
            self._ring.give(slot)

    def _save(
        self, move: _Move, labelled: Sequence[tuple[Item, bytes]], staged: Slot | None
    ) -> None:
        """Write the headers of a run, and the run itself unless it is in its pack already. It may
        still be in the staging slot.
        """
        run, view = move.run, move.view
        fields = [
            header_fields(self._packs.image, self._packs.owner, digest, item.chunk.length)
            for item, digest in labelled
        ]
        sizes = [record_size(item.chunk.length) for item, _ in labelled]
        if staged is None or move.in_pack:
            for at, each in zip(accumulate(sizes, initial=0), fields, strict=False):
                view[at : at + HEADER] = each.ljust(HEADER, b"\0")
        if move.in_pack:
            return
        what = f"pack {self._packs.packs[run.pack][0]}"
        file = WindowedPack(what, self._buffered[run.pack], self._direct[run.pack])
        with space_errors(what):
            short = point(Point.MOVER_WRITE)
            if staged is None:
                file.write(view, run.offset, short=short)
            else:
                address = staged.staging + run.slot_offset
                file.copy_out(address, run.offset, sizes, fields, staged, short=short)

    def _digests(
        self, slot: Slot, items: Sequence[Item], moves: Iterable[_Move]
    ) -> Sequence[bytes]:
        """Return the digests of the bytes that were copied."""
        if not self._by_copy_engines:
            return split(bytes(slot.digests[: SIZE * len(items)]))
        each = iter(items)
        places = [
            (address + HEADER - run.slot_offset + item.slot_offset, item.chunk.length)
            for run, address, _, _ in moves
            for item in islice(each, run.records)
        ]
        return digest_ranges(self._gpu.digest_key, places)

    def _moves(self, slot: Slot, items: Iterable[Item]) -> list[_Move]:
        """Return the pinned host memory for the runs of a batch."""
        return [self._move(slot, run) for run in _joined(items)]

    def _move(self, slot: Slot, run: _Run) -> _Move:
        # Looked up each time, as packs may still be on their way to being pinned.
        pack = self._transfer.pinned_packs.find(self._files[run.pack])
        end = run.offset + run.size
        if pack is not None and end <= len(pack.view):
            return _Move(run, pack.address + run.offset, pack.view[run.offset : end], True)
        first, last = run.slot_offset, run.slot_offset + run.size
        return _Move(run, slot.host + first, slot.view[first:last], False)


def _joined(items: Iterable[Item]) -> Iterator[_Run]:
    """Join the records of a batch into runs, in order."""
    run: _Run | None = None
    for item in items:
        size = record_size(item.chunk.length)
        if run is not None and (run.pack, run.offset + run.size) == (item.pack, item.offset):
            run = run._replace(size=run.size + size, records=run.records + 1)
            continue
        if run is not None:
            yield run
        run = _Run(item.slot_offset, item.pack, item.offset, size, 1)
    if run is not None:
        yield run
