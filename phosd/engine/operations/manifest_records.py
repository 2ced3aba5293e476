"""What a manifest says of a unit: its processes and the blocks of their device memory."""

from collections.abc import Mapping, Sequence

from phosd.engine.image.manifest import Block, ChunkRef, Process
from phosd.engine.memory.exported import Held
from phosd.engine.program.group import Unit
from phosd.engine.program.tree import ProcessTree


def process_records(
    trees: Sequence[ProcessTree], unit: Unit, *, parked: bool
) -> tuple[Process, ...]:
    """The processes of ``trees``, which are the unit's as they were when it stood still."""
    members = {member.pid: member for member in unit.members}
    return tuple(
        process.record(
            number,
            gpu=process.pid in members,
            hooked=process.pid in members and members[process.pid].link is not None,
            parked=process.pid in members and parked,
        )
        for number, tree in enumerate(trees)
        for process in tree
    )


def block_records(
    trees: Sequence[ProcessTree],
    blocks: Sequence[Held],
    chunks: Mapping[int, tuple[ChunkRef, ...]],
) -> tuple[Block, ...]:
    """The blocks, ``chunks`` by key. Memory that several share is the first's."""
    index = {p.pid: i for i, p in enumerate(p for tree in trees for p in tree)}
    first: dict[int, Held] = {}
    records = []
    for held in blocks:
        owner = first.setdefault(held.key, held)
        alone = owner is held
        records.append(
            Block(
                process=index[held.pid],
                id=held.block.id,
                va=held.block.va,
                size=held.block.size,
                gpu=held.gpu,
                chunks=chunks[held.key] if alone else (),
                alias=None if alone else (index[owner.pid], owner.block.id),
            )
        )
    return tuple(records)
