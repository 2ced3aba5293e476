"""Send an engine's requests to the data mover of a GPU."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from phosd import unix_sockets
from phosd.engine.digest import DigestKey, split
from phosd.engine.image.manifest import ChunkRef
from phosd.engine.image.store import Image, ImageWriter
from phosd.engine.image.writer import Pack
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.launcher import START_SECONDS, Child, MoverProcess, connections
from phosd.engine.mover.client.other_version import require_replaceable
from phosd.engine.mover.client.requests import (
    Copies,
    DrainResult,
    DrainSource,
    Saved,
    enough,
    places,
    target,
)
from phosd.engine.mover.client.ring import ring_size
from phosd.engine.mover.client.rpc import RpcChannel
from phosd.engine.mover.protocol import wire
from phosd.engine.mover.protocol.connection import Connection
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, OutOfMemory, PhosError

ROOM = 16 << 20
"""Device memory that NVIDIA's driver needs to take a program off a GPU: measured are 8 MiB
(hazard 51).
"""
_END_SECONDS = 10.0
_MORE_CHANNELS = 3
"""Connections besides the first, which go to the mover with :class:`~wire.Attach`."""


class Mover:
    """A running data mover, found or started by :meth:`start`.

    It has four channels with one request at a time each: for transfers to and from the host, for
    pinning host memory, for transfers between GPUs, and for requests that move no data. So the stop
    of one program does not wait for requests of seconds while another one runs.

    Blocks are named by ``key``, any number below 2^63 that the engine chooses, unique within a
    mover. If a mover died or fell silent, every call raises :class:`Internal`; start another.
    """

    def __init__(self, gpu: int, process: MoverProcess, channels: Sequence[RpcChannel]) -> None:
        self.gpu = gpu
        self._process = process
        self._channels = tuple(channels)
        self._to_host, self._pinning, self._on_gpu, self._aside = self._channels
        self._dropped: set[int] = set()
        self._own_folder: Path | None = None

    @classmethod
    def start(
        cls,
        gpu: int,
        ring_bytes: int | None,
        key: DigestKey,
        runtime_dir: Path | None = None,
        child: Child | None = None,
    ) -> Self:
        """Return the mover of GPU ``gpu`` (the node's ordinal), ready for requests.

        It is the one that runs in ``runtime_dir``, or a new one; without it, one that no other
        engine can find. ``ring_bytes`` is the size of its pinned host memory, and of its staging
        memory on the device; None for the default; a running mover keeps its own. ``key`` is the
        digest key of the store. ``child`` is the process that this engine has started before to
        become this mover.
        """
        size = ring_size(ring_bytes)
        if runtime_dir is not None:
            return cls._start(gpu, size, key, runtime_dir, child)
        folder = Path(tempfile.mkdtemp(prefix="phos-mover-"))
        try:
            mover = cls._start(gpu, size, key, folder)
        except BaseException:
            shutil.rmtree(folder)
            raise
        mover._own_folder = folder
        return mover

    @classmethod
    def _start(
        cls,
        gpu: int,
        ring_bytes: int,
        key: DigestKey,
        runtime_dir: Path,
        child: Child | None = None,
    ) -> Self:
        found = connections(gpu, ring_bytes, runtime_dir, child)
        return next(mover for each in found if (mover := cls._attach(gpu, *each, key)))

    @classmethod
    def _attach(
        cls,
        gpu: int,
        connection: Connection,
        child: Child | None,
        key: DigestKey,
    ) -> Self | None:
        """Become the mover's engine; return None if the mover was about to end, or was of another
        version and has ended. Raises :class:`Busy` if one of another version must stay, and
        :class:`Internal` if a new one is of another version.
        """
        try:
            process = MoverProcess(connection.peer()[0], child)
        except ProcessLookupError:
            connection.close()
            return None
        pairs = [unix_sockets.pair(descriptors=True) for _ in range(_MORE_CHANNELS)]
        ends = (connection, *(Connection(ours) for ours, _ in pairs))
        mover = cls(gpu, process, [RpcChannel(gpu, process, end) for end in ends])
        first = mover._channels[0]
        try:
            with contextlib.ExitStack() as stack:
                theirs = [stack.enter_context(end).fileno() for _, end in pairs]
                first.send(wire.Attach(key.packed), theirs)
            versions = {
                channel.reply(wire.Done, START_SECONDS)[0].version for channel in mover._channels
            }
        except BaseException as error:
            ending = first.broken and process.ended_well and isinstance(error, Internal)
            for channel in mover._channels:
                channel.close()
            process.close()
            if ending:
                return None
            raise
        if versions == {wire.VERSION}:
            return mover
        require_replaceable(gpu, process.pid, stays=mover.close(), is_new=child is not None)
        return None

    @property
    def alive(self) -> bool:
        """Whether the mover can take requests."""
        return not any(channel.broken for channel in self._channels) and self._process.running

    @property
    def pid(self) -> int:
        """The mover's process id."""
        return self._process.pid

    def adopt(self, blocks: Sequence[tuple[int, int, int]], home: int | None = None) -> None:
        """Import and map memory: (key, size in bytes, descriptor). All of them or none.

        The mover duplicates the descriptors; the caller keeps its own. Memory of another GPU, whose
        ordinal is ``home``, can only be fetched from.
        """
        request = wire.Adopt([(key, size) for key, size, _ in blocks], home)
        self._aside.ask(request, wire.Done, [fd for *_, fd in blocks])

    def create(self, blocks: Sequence[tuple[int, int]], *, host: Sequence[int] = ()) -> list[int]:
        """Allocate and map new memory: (key, size in bytes). All of them or none.

        ``host`` are the keys of those that are to be in the host's RAM. Returns one descriptor
        each, in order, which the caller must close. Raises :class:`OutOfMemory`.
        """
        _, descriptors = self._aside.ask(wire.Create(list(blocks), list(host)), wire.Done)
        return descriptors

    def create_together(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Allocate blocks like :meth:`create`, but in one allocation that cannot be exported.

        It is freed when the last of the blocks has been dropped.
        """
        self._aside.ask(wire.CreateTogether(list(blocks)), wire.Done)

    def drop(self, keys: Iterable[int]) -> None:
        """Unmap and release blocks; guarded ones once they are no longer guarded.

        Blocks that a drain has dropped are skipped.
        """
        self._aside.ask(wire.Drop([key for key in keys if key not in self._dropped]), wire.Done)

    def digest(self, keys: Iterable[int]) -> dict[int, list[bytes]]:
        """Return the digest of every chunk of these blocks, by one launch."""
        answer, _ = self._on_gpu.ask(wire.Digest(list(keys)), wire.Digests)
        return {key: split(blob) for key, blob in answer.blocks}

    def count_different(self, keys: Iterable[int]) -> int:
        """Estimate how many chunks of these blocks differ from all before them. Runs no kernel."""
        answer, _ = self._on_gpu.ask(wire.Sample(list(keys)), wire.Sampled)
        return answer.different

    def save(
        self,
        digests: Mapping[int, Sequence[bytes]],
        writer: ImageWriter,
        progress: Progress | None = None,
        packs: Sequence[Pack] = (),
    ) -> Saved:
        """Copy blocks into packs of an image; ``digests`` are those of the stop, by key.

        ``packs`` are empty packs of the image to fill first, perhaps pinned; more are created if
        needed. Every chunk is hashed again from the copy that is saved. A chunk that the image
        already has is not copied. Raises :class:`OutOfSpace`, :class:`Cancelled`.
        """
        wanted = {digest.hex() for parts in digests.values() for digest in parts}
        known = [ref for digest in wanted if (ref := writer.find(digest)) is not None]
        writer.claim(len(wanted) - len(known))
        packs = enough(writer, packs, len(wanted) - len(known))
        request = wire.Save(
            blocks=[(key, b"".join(parts)) for key, parts in digests.items()],
            target=target(writer, packs),
            known=known,
        )
        descriptors = [pack.fd for pack in packs]
        answer, _ = self._to_host.ask(request, wire.Stored, descriptors, progress)
        writer.add(ref for _, refs in answer.blocks for ref in refs)
        return Saved({key: tuple(refs) for key, refs in answer.blocks}, answer.changed)

    def drain(
        self,
        source: DrainSource,
        writer: ImageWriter,
        progress: Progress | None = None,
        packs: Sequence[Pack] = (),
        *,
        let_go: Callable[[Sequence[int]], None] | None = None,
    ) -> DrainResult:
        """Save blocks while their programs run and their hooks copy on write.

        ``packs`` are as for :meth:`save`. Chunks that :func:`redundant` names are not copied.
        ``let_go`` is called on this thread with the keys of blocks and slabs that the mover dropped
        because their program needs the memory: it must close every other descriptor of them; the
        program is then told that the memory is free.

        May begin before the gates open. On failure the chunk maps' phase becomes ``aborted``,
        unless the mover died. Raises as :meth:`save` does.
        """
        request, packs = source.request(writer, packs)

        def dropped(keys: Sequence[int]) -> None:
            self._dropped.update(keys)
            if let_go is not None:
                let_go(keys)

        descriptors = [chunk_map.fd for chunk_map in source.chunk_maps] + [
            pack.fd for pack in packs
        ]
        answer, _ = self._to_host.ask(request, wire.Drained, descriptors, progress, dropped)
        writer.add(ref for _, refs in answer.blocks for ref in refs if ref is not None)
        chunks = places(writer, {key: source.digests[key] for key, _ in answer.blocks})
        return DrainResult(chunks, *msgspec.structs.astuple(answer)[1:])

    def copy(
        self,
        chunks: Iterable[tuple[int, int]],
        copies: Copies,
        progress: Progress | None = None,
        *,
        proven: Mapping[tuple[int, int], bytes] | None = None,
        let_go: Callable[[Sequence[int]], None] = lambda _: None,
        by_copy_engines: bool = False,
    ) -> dict[tuple[int, int], bytes]:
        """Copy chunks, as (key, chunk index), as they are now, each once.

        Programs may run and write them. ``copies`` records their places, so that a later pass
        replaces them. Returns the digests of the saved bytes; compare them with :meth:`digest` to
        know whether the memory still has these. Raises as :meth:`save` does.

        ``proven`` has the digests of all chunks if no process but this mover has the blocks: only
        the copy engines then work, and each block is dropped once it has left the device, or all of
        them if the job is cancelled. ``let_go`` is called on this thread with the keys of dropped
        blocks. ``by_copy_engines``: run no kernel beside programs that cannot be interrupted; the
        CPU hashes the saved bytes.
        """
        request, descriptors = copies.request(chunks, proven, by_copy_engines=by_copy_engines)
        answer, _ = self._to_host.ask(request, wire.Copied, descriptors, progress, let_go)
        return copies.note(request, answer)

    def pin(self, packs: Iterable[int]) -> int:
        """Map and pin the open packs that are in memory, which takes seconds for tens of GB, and
        all cores of the host. Unpins those that are kept and were removed. Returns the number for
        :meth:`unpin`.
        """
        answer, _ = self._pinning.ask(wire.Pin(), wire.Pinned, list(packs))
        return answer.number

    def unpin(self, pinned: int, *, keep: bool = False) -> None:
        """Give back the packs of one :meth:`pin`. With ``keep`` they stay pinned until their files
        are removed.
        """
        self._pinning.ask(wire.Unpin(pinned, keep), wire.Done)

    def load(
        self,
        plan: Mapping[int, Sequence[ChunkRef]],
        image: Image,
        progress: Progress | None = None,
        *,
        arriving: bool = False,
    ) -> None:
        """Fill blocks from an opened image, and hash every byte on the GPU. Packs that stay pinned
        since the image was made are read by the device itself.

        ``arriving``: another thread creates the blocks meanwhile, and cancels this if it fails.
        Raises :class:`ImageCorrupt` naming the chunk that does not have its digest, and
        :class:`Cancelled`.
        """
        wanted = sorted({ref.pack for refs in plan.values() for ref in refs})
        rows = [(key, list(refs)) for key, refs in plan.items()]
        request = wire.Load(rows, wanted, arriving)
        packs = [image.packs[number] for number in wanted]
        pinned, _ = self._pinning.ask(wire.Pin(kept=True), wire.Pinned, packs)
        try:
            self._to_host.ask(request, wire.Done, packs, progress)
        finally:
            self.unpin(pinned.number, keep=True)

    def fetch(
        self,
        chunks: Mapping[int, tuple[int, Sequence[int]]],
        progress: Progress | None = None,
    ) -> None:
        """Copy chunks of other blocks into blocks; from other GPUs peer to peer if possible.

        ``chunks`` maps keys to (key of the source, chunk indices). Raises :class:`Cancelled`.
        """
        rows = [(key, source, list(indices)) for key, (source, indices) in chunks.items()]
        self._on_gpu.ask(wire.Fetch(rows), wire.Done, progress=progress)

    def free_memory(self) -> tuple[int, int]:
        """Return (free, total) memory of the device in bytes."""
        answer, _ = self._aside.ask(wire.FreeMemory(), wire.Memory)
        return answer.free, answer.total

    def reserve(self, byte_count: int, processes: Iterable[ProcessId] = ()) -> None:
        """Reserve device memory until :meth:`unreserve`. Raises :class:`OutOfMemory`.

        The reservation outlives this engine while one of ``processes`` lives.
        """
        self._aside.ask(wire.Reserve(byte_count, list(processes)), wire.Done)

    def unreserve(self, processes: Iterable[ProcessId] = ()) -> None:
        """Release the memory that :meth:`reserve` reserved for these processes."""
        self._aside.ask(wire.Reserve(0, list(processes)), wire.Done)

    def keep_room(self) -> None:
        """Keep :data:`ROOM` from other programs, if it is free, until :meth:`lend_room`."""
        with contextlib.suppress(OutOfMemory):  # who needs it looks whether it is there
            self.reserve(ROOM)

    def lend_room(self) -> None:
        """Release what :meth:`keep_room` keeps."""
        self.unreserve()

    def guard(self, blocks: Iterable[tuple[ProcessId, int, int]]) -> None:
        """Guard blocks, as (process, block id, key), that are about to be parked.

        They stay with the mover if this engine ends, until :meth:`unguard`, or until the process
        has ended.
        """
        rows = [(*process, block, key) for process, block, key in blocks]
        self._aside.ask(wire.Guard(rows), wire.Done)

    def unguard(self, processes: Iterable[ProcessId]) -> None:
        """Stop guarding blocks of these processes, which have their memory again."""
        self._aside.ask(wire.Unguard(list(processes)), wire.Done)

    def close(self) -> bool:
        """Release the mover. It exits unless it guards parked memory; everything else is freed.
        Returns whether it stays.
        """
        # Its answers are unknown: it may guard something.
        stays = any(channel.out_of_step for channel in self._channels)
        told = self.alive
        if told:
            try:
                stays = self._aside.ask(wire.Leave(), wire.Farewell)[0].stays
            except PhosError:
                told = False  # it is killed like one that no longer answers
        for channel in self._channels:
            channel.close()
        if not stays and not self._process.wait(_END_SECONDS if told else 0):
            self._process.kill()
            self._process.wait(_END_SECONDS)
        self._process.close()
        if self._own_folder is not None and not stays:
            shutil.rmtree(self._own_folder)
        return stays

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
