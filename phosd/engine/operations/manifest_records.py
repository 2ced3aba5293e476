"""Make a manifest's records of the processes of a group and of their blocks."""

from collections.abc import Iterator, Mapping, Sequence

from phosd.engine.criu.run.memory_handles import MemoryHandle, MemoryName
from phosd.engine.image.manifest import Block, ChunkRef, Process
from phosd.engine.memory.exported import ExportedBlock, distinct
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.tree import ProcessTree, TreeProcess


def process_records(
    trees: Sequence[ProcessTree], group: CheckpointGroup, *, parked: bool
) -> tuple[Process, ...]:
    """Return the records of the processes of ``trees``, as they were during the stop, with the ids
    that they have here.
    """
    return tuple(record for _, record in _records(trees, group, parked=parked))


def saved_records(
    trees: Sequence[ProcessTree], group: CheckpointGroup, *, parked: bool
) -> tuple[Process, ...]:
    """Return them with the ids that the processes have for themselves, which a restore gives
    back.
    """
    return tuple(
        process.in_own_ids(record) for process, record in _records(trees, group, parked=parked)
    )


def _records(
    trees: Sequence[ProcessTree], group: CheckpointGroup, *, parked: bool
) -> Iterator[tuple[TreeProcess, Process]]:
    members = {member.pid: member for member in group.members}
    for number, tree in enumerate(trees):
        for process in tree:
            member = members.get(process.pid)
            yield (
                process,
                process.record(
                    number,
                    gpu=member is not None,
                    hooked=member is not None and member.link is not None,
                    parked=member is not None and parked,
                ),
            )


def memory_handles(
    trees: Sequence[ProcessTree], shared: Sequence[ExportedBlock]
) -> list[MemoryHandle]:
    """Return the memory of blocks that programs share, as a manifest names it."""
    own = {p.pid: p.own_pid for tree in trees for p in tree}
    return [
        MemoryHandle(MemoryName(own[each.pid], each.block.id), each.descriptor)
        for each in distinct(shared)
    ]


def block_records(
    trees: Sequence[ProcessTree],
    blocks: Sequence[ExportedBlock],
    chunks: Mapping[int, tuple[ChunkRef, ...]],
) -> tuple[Block, ...]:
    """Return the records of blocks; ``chunks`` is by key. Shared memory is the first block's."""
    index = {p.pid: i for i, p in enumerate(p for tree in trees for p in tree)}
    first: dict[int, ExportedBlock] = {}
    records = []
    for exported in blocks:
        owner = first.setdefault(exported.key, exported)
        alone = owner is exported
        records.append(
            Block(
                process=index[exported.pid],
                id=exported.block.id,
                va=exported.block.va,
                size=exported.block.size,
                gpu=exported.gpu,
                host=exported.host,
                chunks=chunks[exported.key] if alone else (),
                alias=None if alone else (index[owner.pid], owner.block.id),
            )
        )
    return tuple(records)
