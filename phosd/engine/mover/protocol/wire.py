"""Define the messages between the engine and a data mover: msgpack over unix sockets.

A client begins with :class:`Attach`. The engine's brings the ends of three socket pairs, so that
there are four connections; requests of different connections are served at the same time
(:class:`~phosd.engine.mover.client.mover.Mover` says which goes where). The mover answers with
:class:`Done` on each when it is ready. A visitor, whose key is empty, may only list guarded memory
and ask for its release.

On each connection the engine sends one request at a time and numbers it; the mover answers with any
number of :class:`Moved` and then one other reply of the same number. :class:`Cancel` may follow a
request at any time. A drain or a copy may also send :class:`Dropped`, which the engine answers with
:class:`Settled`.
"""

import msgspec

from phosd.engine.image.manifest import ChunkRef
from phosd.engine.system.procfs import ProcessId

VERSION = 3
"""Rises with every change of these messages or of what they mean. An engine works with movers of
its own version only. What a visitor says and hears stays the same, so that memory which any mover
guards can be brought back.
"""


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of all messages."""


class Attach(Message, frozen=True):
    """The first message. ``key`` is the digest key of the engine's store; empty for a visitor.

    The engine's carries three descriptors: the mover's ends of three more connections.
    """

    key: bytes


class Leave(Message, frozen=True):
    """Release the mover; :class:`Farewell` says whether it stays.

    A visitor may send it to a mover that no engine has used yet, which then ends.
    """


class Guard(Message, frozen=True):
    """Guard blocks about to be parked beyond the engine's life: (pid, start time, block id, key).

    They stay until :class:`Unguard`, or until their process has ended.
    """

    blocks: list[tuple[int, int, int, int]]


class Unguard(Message, frozen=True):
    """Stop guarding blocks of these processes, which have their memory again."""

    processes: list[ProcessId]


class ListParked(Message, frozen=True):
    """List the guarded blocks; the reply carries one descriptor per block."""


class Adopt(Message, frozen=True):
    """Import and map blocks, with one descriptor each. ``blocks``: (key, size in bytes).

    ``home`` is the ordinal of the GPU that has them, if it is another: such blocks can only be
    fetched from.
    """

    blocks: list[tuple[int, int]]
    home: int | None = None


class Create(Message, frozen=True):
    """Allocate and map new blocks; the reply carries one descriptor each.

    ``host`` are the keys of blocks in the host's RAM.
    """

    blocks: list[tuple[int, int]]
    host: list[int] = []


class CreateTogether(Message, frozen=True):
    """Allocate new blocks together, not exportable; the memory is freed with the last of them."""

    blocks: list[tuple[int, int]]


class Drop(Message, frozen=True):
    """Unmap and release blocks; guarded blocks only once they are no longer guarded."""

    keys: list[int]


class Digest(Message, frozen=True):
    """Hash every chunk of these blocks."""

    keys: list[int]


class Sample(Message, frozen=True):
    """Count the chunks of these blocks that differ from all others, by samples."""

    keys: list[int]


class Packs(msgspec.Struct, array_like=True, frozen=True):
    """Packs of an image to write to: (number, capacity in bytes), with their descriptors."""

    packs: list[tuple[int, int]]
    image: str
    owner: int


class Save(Message, frozen=True):
    """Copy blocks into packs.

    ``blocks``: (key, digests of the stop, 16 bytes per chunk); ``known``: chunks that the image
    already has.
    """

    blocks: list[tuple[int, bytes]]
    target: Packs
    known: list[ChunkRef]


class DrainedBlock(msgspec.Struct, array_like=True, frozen=True):
    """A block of a chunk map, with 1 byte in ``wanted`` and 16 in ``digests`` per chunk.

    ``order``: 32 bits per chunk, low numbers are saved first, 0 is unknown; or empty.
    """

    key: int
    first_chunk: int
    digests: bytes
    wanted: bytes
    order: bytes


class DrainedBoard(msgspec.Struct, array_like=True, frozen=True):
    """The part of a program's chunk map that is on this GPU, which the program calls ``device``.

    ``slabs`` are blocks for shadows; their slots are counted from ``first_slot``.
    """

    device: int
    blocks: list[DrainedBlock]
    slabs: list[int]
    first_slot: int


class Drain(Message, frozen=True):
    """Save blocks while their programs run; descriptors: the chunk maps', then the packs'.

    ``audit``: also count shadows that were not needed. ``patience``: seconds without other work
    after which a shadow that is still being copied is given up.
    """

    chunk_maps: list[DrainedBoard]
    target: Packs
    audit: bool
    patience: float


class Settled(Message, frozen=True):
    """Confirm that the engine has released the blocks named by :class:`Dropped`."""


class Copy(Message, frozen=True):
    """Copy chunks as they are now: (key, index, place of the pack, offset of the record).

    A negative pack asks for a new record, after the ``used`` bytes of some pack. ``proven``: the
    chunks' digests, 16 bytes each, if no other process can write the blocks; they are then not
    hashed again, and each block is dropped (:class:`Dropped`) once it has left the device. Or
    empty. ``by_copy_engines``: run no kernel on the GPU; the CPU hashes the chunks.
    """

    chunks: list[tuple[int, int, int, int]]
    target: Packs
    used: list[int]
    proven: bytes
    by_copy_engines: bool = False


class Pin(Message, frozen=True):
    """Map and pin packs, whose descriptors come along, so that the device can write to them.

    ``kept``: only those that are pinned already.
    """

    kept: bool = False


class Pinned(Message, frozen=True):
    """The packs are pinned; ``number`` is for :class:`Unpin`."""

    number: int


class Unpin(Message, frozen=True):
    """Give back packs that were pinned. ``keep``: they stay pinned as long as their files exist."""

    number: int
    keep: bool = False


class Load(Message, frozen=True):
    """Fill blocks from packs, whose descriptors come along, and hash the blocks.

    ``arriving``: blocks that are not there yet are waited for; they are being created.
    """

    blocks: list[tuple[int, list[ChunkRef]]]
    packs: list[int]
    arriving: bool = False


class Fetch(Message, frozen=True):
    """Copy chunks from blocks on this GPU or others: (key, key of the source, chunk indices)."""

    blocks: list[tuple[int, int, list[int]]]


class FreeMemory(Message, frozen=True):
    """Query the device's free and total memory."""


class Reserve(Message, frozen=True):
    """Reserve ``byte_count`` of device memory for ``processes``; 0 releases it.

    The reservation outlives the engine while one of the processes lives.
    """

    byte_count: int
    processes: list[ProcessId]


class Cancel(Message, frozen=True):
    """Cancel the request with the same sequence number."""


class Done(Message, frozen=True):
    """The request was carried out. ``version``, in the first answer on a connection: the mover's
    :data:`VERSION`; movers from before there was one say 0.
    """

    version: int = 0


class Failed(Message, frozen=True):
    """The request failed; ``code`` is the name of a class in errors.py."""

    code: str
    what: str
    hint: str
    reason: str = ""


class Moved(Message, frozen=True):
    """``byte_count`` more bytes of the running request are done."""

    byte_count: int


class Digests(Message, frozen=True):
    """Digests: (key, 16 bytes per chunk)."""

    blocks: list[tuple[int, bytes]]


class Sampled(Message, frozen=True):
    """So many chunks differ from all before them, as far as samples tell."""

    different: int


class Stored(Message, frozen=True):
    """The places of the chunks, and the (key, index) that differ from the digests of the stop."""

    blocks: list[tuple[int, list[ChunkRef]]]
    changed: list[tuple[int, int]]


class Copied(Message, frozen=True):
    """In the order of the request: (pack, offset, length) of each chunk, and 16 bytes of digest."""

    places: list[tuple[int, int, int]]
    digests: bytes


class Dropped(Message, frozen=True):
    """Blocks that the mover dropped, in a drain because their program needs the memory."""

    keys: list[int]


class Drained(Message, frozen=True):
    """The result of a drain; see :class:`phosd.engine.mover.client.requests.DrainResult`.

    ``blocks``: the place of each chunk that was wanted.
    """

    blocks: list[tuple[int, list[ChunkRef | None]]]
    changed: list[tuple[int, int]]
    from_slots: int
    byte_count: int
    seconds_to_saved: float
    longest_to_saved: float
    aborted_for_memory: bool
    dropped: list[int]
    needless_shadows: int | None


class Memory(Message, frozen=True):
    """Device memory in bytes."""

    free: int
    total: int


class Parked(Message, frozen=True):
    """The guarded blocks: (pid, start time, block id), with one descriptor each.

    ``room``: the processes for which memory is reserved.
    """

    blocks: list[tuple[int, int, int]]
    room: list[ProcessId]


class Farewell(Message, frozen=True):
    """Whether the mover stays, because it guards memory of a process, or ends."""

    stays: bool


Request = (
    Attach
    | Leave
    | Guard
    | Unguard
    | ListParked
    | Adopt
    | Create
    | CreateTogether
    | Drop
    | Digest
    | Sample
    | Save
    | Drain
    | Copy
    | Settled
    | Pin
    | Unpin
    | Load
    | Fetch
    | FreeMemory
    | Reserve
    | Cancel
)
Reply = (
    Done
    | Failed
    | Moved
    | Digests
    | Sampled
    | Stored
    | Copied
    | Dropped
    | Drained
    | Pinned
    | Memory
    | Parked
    | Farewell
)
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder[Request | Reply](Request | Reply).decode
