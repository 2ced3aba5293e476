"""Build a mover's requests and define its results, other than plain values."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phosd.engine.digest import split
from phosd.engine.image.manifest import ChunkRef
from phosd.engine.image.packs import RECORD, record_size
from phosd.engine.image.writer import ImageWriter, Pack
from phosd.engine.mover.protocol import wire
from phosd.errors import Internal

TIMEOUT_SECONDS = 10.0
"""Seconds without other work after which a shadow that is still being copied is given up."""


@dataclass(frozen=True)
class Saved:
    """The result of :meth:`Mover.save`.

    ``chunks`` has each block's chunks in order; ``changed`` lists the (key, chunk index) that no
    longer had the digest of the stop. Such an image must not be published.
    """

    chunks: dict[int, tuple[ChunkRef, ...]]
    changed: list[tuple[int, int]]


@dataclass(frozen=True)
class DrainMap:
    """The part of a program's chunk map that is on the mover's GPU, for :meth:`Mover.drain`.

    ``device`` is the program's ordinal of that GPU. ``blocks`` maps keys to the numbers of their
    first chunks in the chunk map. ``slabs`` are the keys of its shadow slabs on this GPU, in the
    order of the chunk map; ``first_slot`` is the number of their first slot.
    """

    fd: int
    device: int
    blocks: Mapping[int, int]
    slabs: Sequence[int] = ()
    first_slot: int = 0


@dataclass(frozen=True)
class DrainSource:
    """What :meth:`Mover.drain` saves: the blocks of ``chunk_maps``.

    ``digests`` are those of the stop, by key. ``order`` may have the numbers of an earlier job's
    ``ChunkMap.touched`` for a block's chunks: low ones are saved first, 0 is unknown. ``audit``:
    also count shadows that were not needed.
    """

    chunk_maps: Sequence[DrainMap]
    digests: Mapping[int, Sequence[bytes]]
    order: Mapping[int, Sequence[int]] = field(default_factory=dict)
    audit: bool = False

    def request(self, writer: ImageWriter, packs: Sequence[Pack]) -> tuple[wire.Drain, list[Pack]]:
        """Return the request, and the packs whose descriptors go with it."""
        keys = [key for chunk_map in self.chunk_maps for key in chunk_map.blocks]
        digests = {key: self.digests[key] for key in keys}
        wanted = {key: bytearray(b"\1" * len(parts)) for key, parts in digests.items()}
        for key, indices in redundant(digests, writer).items():
            for index in indices:
                wanted[key][index] = 0

        def drained(key: int, first_chunk: int) -> wire.DrainedBlock:
            numbers = array("I", self.order.get(key, ())).tobytes()
            parts = (b"".join(digests[key]), bytes(wanted[key]), numbers)
            return wire.DrainedBlock(key, first_chunk, *parts)

        count = sum(map(sum, wanted.values()))
        writer.claim(count)
        filled = enough(writer, packs, count)
        request = wire.Drain(
            chunk_maps=[
                wire.DrainedBoard(
                    chunk_map.device,
                    [drained(key, first) for key, first in chunk_map.blocks.items()],
                    list(chunk_map.slabs),
                    chunk_map.first_slot,
                )
                for chunk_map in self.chunk_maps
            ],
            target=target(writer, filled),
            audit=self.audit,
            patience=TIMEOUT_SECONDS,
        )
        return request, filled


@dataclass(frozen=True)
class DrainResult:
    """The result of :meth:`Mover.drain`.

    ``changed`` lists the (key, chunk index) that differ from the stop: a write was not predicted.
    The drain ends at the first ones, and ``chunks`` is then empty. So it is with
    ``aborted_for_memory``: the program needed the memory that the drain held.

    ``from_slots`` chunks were copied from shadow slots, ``byte_count`` bytes in total.
    ``seconds_to_saved`` is the median time from a chunk's claim until it was marked saved,
    ``longest_to_saved`` the longest. ``dropped`` are keys that the mover no longer holds, because
    the program needed the memory. ``needless_shadows``, with ``audit``: shadowed chunks that still
    had the bytes of the stop at the end.
    """

    chunks: dict[int, tuple[ChunkRef, ...]]
    changed: list[tuple[int, int]]
    from_slots: int
    byte_count: int
    seconds_to_saved: float
    longest_to_saved: float
    aborted_for_memory: bool
    dropped: list[int]
    needless_shadows: int | None


class Copies:
    """The chunks that :meth:`Mover.copy` saved for one job on one mover.

    A chunk that is copied again replaces its earlier copy. ``packs`` are empty packs of the image
    to fill first; more are created if needed.
    """

    def __init__(self, writer: ImageWriter, packs: Sequence[Pack] = ()) -> None:
        self._writer = writer
        self._packs = list(packs)
        self._used = [0] * len(self._packs)
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self.refs: dict[tuple[int, int], ChunkRef] = {}
        """The place of the last copy, with its digest, by (key, chunk index)."""

    def request(
        self,
        chunks: Iterable[tuple[int, int]],
        proven: Mapping[tuple[int, int], bytes] | None = None,
        *,
        by_copy_engines: bool = False,
    ) -> tuple[wire.Copy, list[int]]:
        """Return the request, and the descriptors of the packs."""
        wanted = list(dict.fromkeys(chunks))
        new = sum(chunk not in self._places for chunk in wanted)
        taken = sum(-(-used // RECORD) for used in self._used)
        self._writer.claim(new)
        self._packs = enough(self._writer, self._packs, taken + new)
        self._used += [0] * (len(self._packs) - len(self._used))
        places = (self._places.get(chunk, (-1, 0)) for chunk in wanted)
        rows = [(*chunk, *place) for chunk, place in zip(wanted, places, strict=True)]
        digests = b"".join(proven[chunk] for chunk in wanted) if proven else b""
        packs = target(self._writer, self._packs)
        request = wire.Copy(rows, packs, self._used, digests, by_copy_engines)
        return request, [pack.fd for pack in self._packs]

    def note(self, request: wire.Copy, answer: wire.Copied) -> dict[tuple[int, int], bytes]:
        """Record the mover's answer. Returns the digests of the saved chunks."""
        digests = {}
        rows = zip(request.chunks, answer.places, split(answer.digests), strict=True)
        for (key, index, *_), (pack, offset, length), digest in rows:
            self._places[key, index] = (pack, offset)
            self._used[pack] = max(self._used[pack], offset + record_size(length))
            number = self._packs[pack].number
            self.refs[key, index] = ChunkRef(digest.hex(), number, offset, length)
            digests[key, index] = digest
        return digests


def places(
    writer: ImageWriter, digests: Mapping[int, Sequence[bytes]]
) -> dict[int, tuple[ChunkRef, ...]]:
    """Return the place of each chunk, by key, now that all are stored."""

    def place(digest: bytes) -> ChunkRef:
        ref = writer.find(digest.hex())
        if ref is None:
            raise Internal(f"image {writer.id} lacks a chunk that was to be stored")
        return ref

    return {key: tuple(map(place, parts)) for key, parts in digests.items()}


def redundant(digests: Mapping[int, Sequence[bytes]], writer: ImageWriter) -> dict[int, list[int]]:
    """Return chunks that need no saving, since ``writer`` knows their digest, or it is that of an
    earlier chunk.

    By key, in the order of ``digests``; blocks without such chunks are left out.
    """
    seen: set[bytes] = set()
    find = writer.find
    found: dict[int, list[int]] = {}
    for key, parts in digests.items():
        for index, digest in enumerate(parts):
            if digest in seen or find(digest.hex()) is not None:
                found.setdefault(key, []).append(index)
            else:
                seen.add(digest)
    return found


def enough(writer: ImageWriter, packs: Sequence[Pack], chunk_count: int) -> list[Pack]:
    """Return ``packs``, with as many new ones as ``chunk_count`` chunks need."""
    room = sum(pack.capacity // RECORD for pack in packs)
    return [*packs, *(writer.packs(chunk_count - room) if chunk_count > room else ())]


def target(writer: ImageWriter, packs: Sequence[Pack]) -> wire.Packs:
    return wire.Packs([(pack.number, pack.capacity) for pack in packs], writer.id, writer.owner)
