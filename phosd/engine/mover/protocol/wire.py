"""The protocol between the engine and a data mover: msgpack over two unix sockets.

A client begins with :class:`Attach`. The engine's brings the end of a socket pair: the connection
is for requests that move data, the pair for those that are answered at once, also while data move:
:class:`Adopt`, :class:`Create`, :class:`Drop`, :class:`FreeMemory`, :class:`Reserve`, and all that
concerns what is parked. The mover answers with :class:`Done` on both when it is ready. A visitor,
which brings no key, may only ask for what is parked, and let go of it.

The engine sends one request at a time and numbers it; the mover answers with any number of
:class:`Moved` and then one other reply of the same number. :class:`Cancel` may follow a request at
any time. A drain or a copy may also send :class:`Dropped`, which the engine answers with
:class:`Settled`.
"""

import msgspec

from phosd.engine.image.manifest import ChunkRef
from phosd.engine.system.procfs import ProcessId


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of all messages."""


class Attach(Message, frozen=True):
    """The first message. ``key`` is that of the store whose digests are wanted; empty: a visitor.

    The engine's carries three descriptors, the mover's ends of three more connections.
    """

    key: bytes


class Leave(Message, frozen=True):
    """The engine needs the mover no more; :class:`Farewell` says what it does then."""


class Guard(Message, frozen=True):
    """Blocks are about to be parked, and must outlive the engine: (pid, start time, block id, key).

    They stay until :class:`Unguard`, or until their process has ended.
    """

    blocks: list[tuple[int, int, int, int]]


class Unguard(Message, frozen=True):
    """Nothing of these processes is parked any more."""

    processes: list[ProcessId]


class ListParked(Message, frozen=True):
    """Ask for what is guarded; the reply carries one descriptor a block."""


class Adopt(Message, frozen=True):
    """Import and map blocks; one descriptor comes with each. ``blocks``: (key, size in bytes).

    ``home`` is the ordinal of the GPU that has them, if it is another: they can be fetched from.
    """

    blocks: list[tuple[int, int]]
    home: int | None = None


class Create(Message, frozen=True):
    """Make and map new blocks; the reply carries one descriptor each."""

    blocks: list[tuple[int, int]]


class CreateTogether(Message, frozen=True):
    """Make new blocks in one allocation, which goes with the last of them; for the mover alone."""

    blocks: list[tuple[int, int]]


class Drop(Message, frozen=True):
    """Unmap and release blocks; those that are guarded only as soon as they no longer are."""

    keys: list[int]


class Digest(Message, frozen=True):
    """Hash every chunk of some blocks."""

    keys: list[int]


class Packs(msgspec.Struct, array_like=True, frozen=True):
    """Packs of an image to write to: (number, capacity in bytes); their descriptors come along."""

    packs: list[tuple[int, int]]
    image: str
    owner: int


class Save(Message, frozen=True):
    """Copy blocks into packs.

    ``blocks``: (key, digests of the stop, 16 bytes a chunk); ``known``: chunks that the image
    already has.
    """

    blocks: list[tuple[int, bytes]]
    target: Packs
    known: list[ChunkRef]


class DrainedBlock(msgspec.Struct, array_like=True, frozen=True):
    """A block of a chunk map: one byte in ``wanted`` and 16 in ``digests`` a chunk.

    ``order``: 32 bits a chunk, low numbers are saved first, 0 is unknown; or empty.
    """

    key: int
    first_chunk: int
    digests: bytes
    wanted: bytes
    order: bytes


class DrainedBoard(msgspec.Struct, array_like=True, frozen=True):
    """A program's chunk map: what it has on this GPU, which it calls ``device``.

    ``slabs`` are blocks for shadows, whose slots are counted from ``first_slot``.
    """

    device: int
    blocks: list[DrainedBlock]
    slabs: list[int]
    first_slot: int


class Drain(Message, frozen=True):
    """Save blocks whose programs run; the descriptors of the chunk maps come before the packs'.

    ``audit``: also count the shadows that were not needed. ``patience``: seconds without anything
    else to do after which a shadow that is still being made is given up.
    """

    chunk_maps: list[DrainedBoard]
    target: Packs
    audit: bool
    patience: float


class Settled(Message, frozen=True):
    """The engine has let go of what :class:`Dropped` named."""


class Copy(Message, frozen=True):
    """Copy chunks as they are: (key, index, pack as a place in ``target``, offset of the record).

    A negative pack asks for a new record, behind the ``used`` bytes of some pack. ``proven``: 16
    bytes a chunk, their digests, if nobody can write the blocks: they are not hashed again, and
    each block is dropped (:class:`Dropped`) as soon as it has left the device; or empty.
    """

    chunks: list[tuple[int, int, int, int]]
    target: Packs
    used: list[int]
    proven: bytes


class Pin(Message, frozen=True):
    """Make packs, whose descriptors come with it, ready to be written to by the device."""


class Pinned(Message, frozen=True):
    """They are; ``number`` is for :class:`Unpin`."""

    number: int


class Unpin(Message, frozen=True):
    """Let go of packs that were pinned."""

    number: int


class Load(Message, frozen=True):
    """Fill blocks from packs, whose descriptors come with it, and hash them."""

    blocks: list[tuple[int, list[ChunkRef]]]
    packs: list[int]


class Fetch(Message, frozen=True):
    """Copy chunks of blocks of this GPU or of others: (key, key of the source, chunk indices)."""

    blocks: list[tuple[int, int, list[int]]]


class FreeMemory(Message, frozen=True):
    """Ask for the device's memory."""


class Reserve(Message, frozen=True):
    """Keep ``byte_count`` of device memory for ``processes``; 0 lets go of it.

    It outlives the engine as long as one of them lives.
    """

    byte_count: int
    processes: list[ProcessId]


class Cancel(Message, frozen=True):
    """Give up the request of the same sequence number."""


class Done(Message, frozen=True):
    """The request was carried out."""


class Failed(Message, frozen=True):
    """The request failed; ``code`` is the name of a class in errors.py."""

    code: str
    what: str
    hint: str


class Moved(Message, frozen=True):
    """``byte_count`` more bytes of the running request are done."""

    byte_count: int


class Digests(Message, frozen=True):
    """(key, 16 bytes a chunk)."""

    blocks: list[tuple[int, bytes]]


class Stored(Message, frozen=True):
    """Where the chunks are, and which (key, index) no longer were what was hashed at the stop."""

    blocks: list[tuple[int, list[ChunkRef]]]
    changed: list[tuple[int, int]]


class Copied(Message, frozen=True):
    """In the order of the request: (pack, offset, length) of each chunk; 16 bytes of digest."""

    places: list[tuple[int, int, int]]
    digests: bytes


class Dropped(Message, frozen=True):
    """Blocks that a request has dropped: a drain because their program needs the memory."""

    keys: list[int]


class Drained(Message, frozen=True):
    """The end of a drain; see :class:`phosd.engine.mover.client.requests.DrainResult`.

    ``blocks``: where each chunk is that was wanted.
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
    """What is guarded: (pid, start time, block id); one descriptor comes with each.

    ``room``: the processes for which room is kept.
    """

    blocks: list[tuple[int, int, int]]
    room: list[ProcessId]


class Farewell(Message, frozen=True):
    """Whether the mover stays, because something of a process is parked, or ends."""

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
