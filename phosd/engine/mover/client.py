"""The engine's side of a data mover."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

import msgspec

from phosd.engine import cuda, errors
from phosd.engine.digest import DigestKey, split
from phosd.engine.errors import Cancelled, Internal, PhosError, Timeout
from phosd.engine.image.manifest import ChunkRef
from phosd.engine.image.store import Image, ImageWriter
from phosd.engine.image.writer import Pack
from phosd.engine.mover import wire
from phosd.engine.mover.requests import DrainBoard, Drained, Saved, drain_request, enough, target
from phosd.engine.native import python_environment
from phosd.engine.progress import Progress

RING_BYTES = 512 << 20
"""Pinned memory of a mover on a real GPU; as much device memory is used for staging."""
SOFTWARE_RING_BYTES = 32 << 20
START_SECONDS = 120.0
"""``cuInit`` can take seconds, pinning half a second a GB."""
SILENCE_SECONDS = 120.0
"""How long a mover may say nothing while it works; every slot that is done makes it speak."""
_POLL_SECONDS = 0.1

_R = TypeVar("_R", bound=wire.Message)


class Mover:
    """A running data mover. Made by :meth:`start`; requests from several threads take turns.

    Blocks go by ``key``, any number below 2^63 that the engine chooses, unique within a mover. A
    mover that died or fell silent answers every call with :class:`Internal`; start another.
    """

    def __init__(
        self, gpu: int, process: "subprocess.Popen[bytes]", connection: wire.Connection
    ) -> None:
        self.gpu = gpu
        self._process = process
        self._connection = connection
        self._sizes: dict[int, int] = {}
        self._sequence = 0
        self._broken = False
        self._lock = threading.Lock()

    @classmethod
    def start(cls, gpu: int, ring_bytes: int | None, key: DigestKey) -> Self:
        """Start the mover of GPU ``gpu`` (the node's ordinal) and wait until it is ready.

        ``ring_bytes`` of pinned host memory, and of device memory, are kept for transfers; None
        for the default. ``key`` is that of the store whose digests it shall compute.
        """
        if ring_bytes is None:
            ring_bytes = SOFTWARE_RING_BYTES if cuda.is_software() else RING_BYTES
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                (
                    *(sys.executable, "-m", "phosd.engine.mover", f"--gpu={gpu}"),
                    *(f"--ring={ring_bytes}", f"--connection={theirs.fileno()}"),
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=python_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        mover = cls(gpu, process, wire.Connection(ours))
        try:
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(key.packed)
            mover._reply(wire.Done, START_SECONDS)
        except BaseException:
            mover.close()
            raise
        return mover

    @property
    def alive(self) -> bool:
        """Whether it can be asked for anything."""
        return not self._broken and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def adopt(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Import and map memory: (key, size in bytes, descriptor). All of them or none.

        The mover duplicates the descriptors; the caller's stay the caller's.
        """
        request = wire.Adopt([(key, size) for key, size, _ in blocks])
        self._ask(request, wire.Done, [fd for *_, fd in blocks])
        self._sizes.update({key: size for key, size, _ in blocks})

    def create(self, blocks: Sequence[tuple[int, int]]) -> list[int]:
        """Make and map new memory: (key, size in bytes). All of them or none.

        Returns one descriptor each, in order, which the caller must close. Raises
        :class:`OutOfMemory`.
        """
        _, descriptors = self._ask(wire.Create(list(blocks)), wire.Done)
        self._sizes.update(blocks)
        return descriptors

    def drop(self, keys: Iterable[int]) -> None:
        """Unmap and release blocks."""
        dropped = list(keys)
        self._ask(wire.Drop(dropped), wire.Done)
        for key in dropped:
            self._sizes.pop(key, None)

    def digest(self, keys: Iterable[int]) -> dict[int, list[bytes]]:
        """The digest of every chunk (2 MiB; the last may be shorter) of some blocks.

        One launch hashes all of them at the speed of the memory.
        """
        answer, _ = self._ask(wire.Digest(list(keys)), wire.Digests)
        return {key: split(blob) for key, blob in answer.blocks}

    def save(
        self,
        digests: Mapping[int, Sequence[bytes]],
        writer: ImageWriter,
        progress: Progress | None = None,
        packs: Sequence[Pack] = (),
    ) -> Saved:
        """Copy blocks into packs of an image; ``digests`` are those of the stop, by key.

        ``packs`` are empty ones of the image to fill first, perhaps pinned; more are made if they
        do not suffice.
        Every chunk is hashed again from the copy that is saved. A chunk that the image already
        has is not copied. Raises :class:`OutOfSpace`, :class:`Cancelled`.
        """
        known = dict(writer.stored)
        wanted = {digest for parts in digests.values() for digest in parts}
        packs = enough(writer, packs, sum(digest.hex() not in known for digest in wanted))
        request = wire.Save(
            blocks=[(key, b"".join(parts)) for key, parts in digests.items()],
            target=target(writer, packs),
            known=list(known.values()),
        )
        descriptors = [pack.fd for pack in packs]
        answer, _ = self._ask(request, wire.Stored, descriptors, progress)
        writer.stored.update((ref.digest, ref) for _, refs in answer.blocks for ref in refs)
        return Saved({key: tuple(refs) for key, refs in answer.blocks}, answer.changed)

    def drain(
        self,
        boards: Sequence[DrainBoard],
        digests: Mapping[int, Sequence[bytes]],
        order: Mapping[int, Sequence[int]],
        writer: ImageWriter,
        progress: Progress | None = None,
        packs: Sequence[Pack] = (),
        *,
        audit: bool = False,
        let_go: Callable[[Sequence[int]], None] | None = None,
    ) -> Drained:
        """Save blocks while their programs run and their hooks copy on write.

        ``digests`` are those of the stop, by key, and ``packs`` as for :meth:`save`. What
        :func:`redundant` names is not copied. ``order`` may give a block's chunks the numbers of an
        earlier job's ``Board.touched``: low ones are saved first, 0 is unknown. ``let_go`` is
        called on this thread with the keys of blocks that the mover has dropped because their
        program freed them and needs the memory: it must close every other descriptor of them.

        May begin before the gates open. On failure the boards' phase becomes ``aborted``, unless
        the mover died. Raises as :meth:`save` does.
        """
        request, packs = drain_request(boards, digests, order, writer, packs, audit=audit)

        def dropped(keys: Sequence[int]) -> None:
            for key in keys:
                self._sizes.pop(key, None)
            if let_go is not None:
                let_go(keys)

        descriptors = [board.fd for board in boards] + [pack.fd for pack in packs]
        answer, _ = self._ask(request, wire.Drained, descriptors, progress, dropped)
        found = (ref for _, refs in answer.blocks for ref in refs if ref is not None)
        writer.stored.update((ref.digest, ref) for ref in found)
        chunks = {
            key: tuple(writer.stored[digest.hex()] for digest in digests[key])
            for key, _ in answer.blocks
        }
        return Drained(chunks, *msgspec.structs.astuple(answer)[1:])

    def pin(self, packs: Sequence[Pack]) -> None:
        """Map and pin the packs that lie in memory; seconds for tens of GB, so in good time."""
        self._ask(wire.Pin(), wire.Done, [pack.fd for pack in packs])

    def unpin(self) -> None:
        """Let go of what :meth:`pin` has pinned."""
        self._ask(wire.Unpin(), wire.Done)

    def load(
        self,
        plan: Mapping[int, Sequence[ChunkRef]],
        image: Image,
        progress: Progress | None = None,
    ) -> None:
        """Fill blocks from an opened image; every byte is hashed on the GPU afterwards.

        Raises :class:`ImageCorrupt` naming the chunk that is not what was saved, and
        :class:`Cancelled`.
        """
        wanted = sorted({ref.pack for refs in plan.values() for ref in refs})
        request = wire.Load([(key, list(refs)) for key, refs in plan.items()], wanted)
        self._ask(request, wire.Done, [image.packs[number] for number in wanted], progress)

    def free_memory(self) -> tuple[int, int]:
        """(free, total) memory of the device in bytes."""
        answer, _ = self._ask(wire.FreeMemory(), wire.Memory)
        return answer.free, answer.total

    def reserve(self, byte_count: int) -> None:
        """Keep device memory from others until :meth:`unreserve`. Raises :class:`OutOfMemory`."""
        self._ask(wire.Reserve(byte_count), wire.Done)

    def unreserve(self) -> None:
        """Let go of what :meth:`reserve` kept."""
        self._ask(wire.Reserve(0), wire.Done)

    def close(self) -> None:
        """End the mover. The memory that only it holds is gone."""
        self._broken = True
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self,
        request: wire.Message,
        kind: type[_R],
        descriptors: "list[int] | None" = None,
        progress: Progress | None = None,
        dropped: Callable[[Sequence[int]], None] | None = None,
    ) -> tuple[_R, list[int]]:
        with self._lock:
            if self._broken:
                raise self._death()
            self._sequence += 1
            self._send(request, descriptors)
            return self._reply(kind, SILENCE_SECONDS, progress, dropped)

    def _send(self, message: wire.Message, descriptors: "list[int] | None" = None) -> None:
        try:
            self._connection.send(self._sequence, message, descriptors)
        except wire.PeerGone:
            self._broken = True
            raise self._death() from None

    def _reply(
        self,
        kind: type[_R],
        patience: float,
        progress: Progress | None = None,
        dropped: Callable[[Sequence[int]], None] | None = None,
    ) -> tuple[_R, list[int]]:
        """Wait for the reply to the last request, passing on what comes before it."""
        deadline = time.monotonic() + patience
        given_up: Cancelled | None = None
        while True:
            try:
                received = self._connection.receive(_POLL_SECONDS)
            except (wire.PeerGone, Timeout):
                self._broken = True
                raise self._death() from None
            if received is not None and received[0] == self._sequence:
                _, message, descriptors = received
                deadline = time.monotonic() + patience
                if isinstance(message, wire.Failed):
                    raise given_up or _error(message)
                if isinstance(message, kind):
                    return message, descriptors
                if isinstance(message, wire.Dropped) and dropped is not None:
                    dropped(message.keys)
                    self._send(wire.Settled())
                if progress is not None and isinstance(message, wire.Moved) and not given_up:
                    progress.advance(message.byte_count)
            if time.monotonic() > deadline:
                self._broken = True
                self._process.kill()
                raise Timeout(
                    f"the data mover of GPU {self.gpu} said nothing for {patience:.0f} s and was"
                    " ended",
                    hint="see the driver's log (dmesg), and try again",
                )
            if progress is not None and given_up is None:
                try:
                    progress.check()
                except Cancelled as error:
                    given_up = error
                    self._send(wire.Cancel())

    def _death(self) -> PhosError:
        """The error for a mover that is gone, with how it ended if that is known."""
        try:
            how = f"ended with status {self._process.wait(1)}"
        except subprocess.TimeoutExpired:
            how = "no longer answers"
        return Internal(
            f"the data mover of GPU {self.gpu} {how}",
            hint="its log and the driver's (dmesg) say more; try again",
        )


def _error(failed: wire.Failed) -> PhosError:
    kind = getattr(errors, failed.code, Internal)
    if not (isinstance(kind, type) and issubclass(kind, PhosError)):
        kind = Internal
    return kind(failed.what, hint=failed.hint)
