"""Describe a suspended program: the manifest of its device memory, and its entry."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from phosd.engine.image.manifest import Block, Manifest, Process, Tree
from phosd.engine.image.usage import pack_bytes
from phosd.engine.image.writer import ImageWriter
from phosd.engine.node.machine import describe_gpus, this_host
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.manifest_records import process_records, saved_records
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.tree import ProcessTree


def manifest_of(
    writer: ImageWriter,
    group: CheckpointGroup,
    trees: Sequence[ProcessTree],
    gpus: Iterable[int],
    blocks: tuple[Block, ...],
    *,
    parked: bool,
    own_ids: bool,
) -> Manifest:
    """Return the manifest of device memory alone, with the ids that the processes of the group's
    ``trees``, as they are when they stand still, have for phosd, or for themselves.
    """
    records = saved_records if own_ids else process_records
    roots = [tree.root.own_pid if own_ids else tree.root.pid for tree in trees]
    return manifest_with(
        writer,
        gpus,
        [Tree(root, f"tree-{n}", ()) for n, root in enumerate(roots)],
        records(trees, group, parked=parked),
        blocks,
        mode="suspend" if parked else "driver",
    )


def manifest_with(
    writer: ImageWriter,
    gpus: Iterable[int],
    trees: Iterable[Tree],
    processes: Iterable[Process],
    blocks: Iterable[Block],
    *,
    mode: str = "suspend",
) -> Manifest:
    """Return the manifest of device memory alone, of these processes."""
    return Manifest(
        id=writer.id,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        mode=mode,
        owner=writer.owner,
        host=this_host(None),
        gpus=describe_gpus(gpus, gpus),
        trees=tuple(trees),
        processes=tuple(processes),
        blocks=tuple(blocks),
        stop_seconds=0.0,
    )


def entry_of(
    manifest: Manifest,
    group: CheckpointGroup,
    where: str,
    device_bytes: dict[int, int],
    form: int,
    *,
    by_runtime: bool,
    hollow: bool,
) -> Suspended:
    """Return the entry of the program that is described by the manifest."""
    root = group.trees[0].root
    known = {each.own_pid: each.pid for tree in group.trees for each in tree.living}
    return Suspended(
        image=manifest.id,
        pid=root.pid,
        start_time=root.start_time,
        owner=manifest.owner,
        command=root.command,
        since=time.time(),
        where=where,
        stored_bytes=sum(pack_bytes(manifest).values()),
        device_bytes=device_bytes,
        processes=tuple(sorted(group.process_ids)),
        format=form,
        known=known if by_runtime else {},
        hollow=hollow,
    )
