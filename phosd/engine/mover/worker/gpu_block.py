"""Say what a block of device memory is to a mover: where it is mapped, and its chunks."""

from dataclasses import dataclass
from typing import Any

from phosd.engine.digest import pack_chunks
from phosd.engine.image.manifest import CHUNK


@dataclass(frozen=True)
class GpuBlock:
    """Device memory that this process has mapped at ``address``; ``size`` in bytes.

    ``chunks`` are (address, length in bytes), and ``table`` is the same for the digest kernel. Both
    are made in advance, because digests are computed while a program is stopped.

    ``home`` is the ordinal of the GPU that has the memory, if this one cannot access it; only the
    driver's peer copy can then read it, through the host.

    ``slab`` is the allocation that the block is a part of, if it has no ``handle`` and ``fd`` of
    its own.
    """

    address: int
    size: int
    handle: Any
    fd: int
    chunks: list[tuple[int, int]]
    table: bytes
    home: int | None = None
    slab: "MappedSlab | None" = None


@dataclass
class MappedSlab:
    """An allocation of ``parts`` blocks."""

    address: int
    size: int
    handle: Any
    parts: int


def chunks_of(address: int, size: int) -> tuple[list[tuple[int, int]], bytes]:
    """Return the chunks of a block, and the kernel's table of them."""
    end = address + size
    chunks = [(at, min(CHUNK, end - at)) for at in range(address, end, CHUNK)]
    return chunks, pack_chunks(chunks)


def whole_chunks(size: int) -> int:
    """Return the bytes of the whole chunks that hold ``size`` bytes."""
    return -(-size // CHUNK) * CHUNK
