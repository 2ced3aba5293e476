"""Checkpoint: save a process tree, GPU and CPU, and let it go on. protocols.md in code.

A phase marked ``stopped`` is time in which the program stands still. Whatever fails, the program
runs afterwards: every step that stops something is a context whose end undoes it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from phosd.engine import criu, driver
from phosd.engine.checkpoint.options import CheckpointOptions
from phosd.engine.cpuparts import CpuParts
from phosd.engine.criu import DumpOptions
from phosd.engine.errors import Busy, NoSuchProcess, PhosError, Unsupported
from phosd.engine.faults import Point, point
from phosd.engine.gate import closed_gates
from phosd.engine.gpus import used_by
from phosd.engine.holdings import Held, Holdings, detached, parked, room_kept
from phosd.engine.host import describe_gpus, this_host
from phosd.engine.image.manifest import Block, ChunkRef, Manifest, Process
from phosd.engine.image.writer import ImageWriter
from phosd.engine.mover import Mover
from phosd.engine.node import Node
from phosd.engine.process import is_gpu_process
from phosd.engine.progress import Progress
from phosd.engine.rights import require_may_save
from phosd.engine.space import check_space
from phosd.engine.tree import ProcessTree
from phosd.engine.undo import Undo
from phosd.engine.unit import Unit, gather


def checkpoint(node: Node, pid: int, options: CheckpointOptions, progress: Progress) -> Manifest:
    """Save the tree of ``pid`` (and of processes that share device memory with it) as an image."""
    options.require_possible()
    progress.phase("prepare")
    with ExitStack() as job:
        job.enter_context(node.claim([pid]))
        unit = job.enter_context(gather(pid, node.config.runtime_dir, _dumpable(options)))
        job.enter_context(node.claim(set(unit.pids) - {pid}))
        mode = _choose_mode(unit, options.mode, progress)
        needs = check_space(node, unit, mode)
        job.callback(node.store.drop_spares)
        node.store.preallocate(needs.gpu)
        writer = job.enter_context(node.store.begin(unit.trees[0].root.uid))
        staging = job.enter_context(node.staging(needs.cpu))
        cpu = CpuParts(node.criu, writer, staging, DumpOptions(tcp=options.tcp))
        job.enter_context(_death_explained(unit))
        if mode == "stop":
            blocks = _stop(node, unit, cpu, writer, options, progress)
        else:
            blocks = ()
            _driver(node, unit, cpu, options, progress)
        progress.phase("persist")
        point(Point.CHECKPOINT_PERSIST)
        trees = cpu.persist()
        progress.phase("publish")
        point(Point.CHECKPOINT_PUBLISH)
        manifest = Manifest(
            id=writer.id,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            mode=mode,
            owner=unit.trees[0].root.uid,
            host=this_host(node.criu),
            gpus=describe_gpus({gpu for member in unit.members for gpu in member.gpus}),
            trees=trees,
            processes=_processes(unit, cpu, parked=mode == "stop"),
            blocks=blocks,
            stop_seconds=progress.stop_seconds,
        )
        writer.publish(manifest)
        progress.finish()
        return manifest


def _dumpable(options: CheckpointOptions) -> Callable[[ProcessTree], object]:
    def check(tree: ProcessTree) -> None:
        require_may_save(tree, options.caller)
        criu.check(tree, options.tcp)

    return check


def _choose_mode(unit: Unit, wanted: str, progress: Progress) -> str:
    why_not = unit.why_not_parked()
    if wanted in ("concurrent", "recopy"):
        raise Unsupported(f"mode {wanted} is not built yet", hint="use mode=stop")
    if wanted == "stop" and why_not:
        raise Unsupported(f"mode stop is not possible: {why_not}", hint="use mode=driver")
    mode = wanted
    if wanted == "auto":
        mode = "driver" if why_not else "stop"
        progress.note(f"mode {mode}: {why_not or 'the hook can park the device memory'}")
    if mode == "driver" and (why_not := unit.why_not_by_driver()):
        raise Unsupported(f"mode driver is not possible: {why_not}", hint="use mode=stop")
    return mode


def _stop(
    node: Node,
    unit: Unit,
    cpu: CpuParts,
    writer: ImageWriter,
    options: CheckpointOptions,
    progress: Progress,
) -> tuple[Block, ...]:
    """Mode ``stop``: the data are copied while the gate is closed, then parked."""
    holdings = Holdings(node, {m.pid: m.gpus for m in unit.members})
    with Undo() as undo:
        undo.add(holdings.close)
        holdings.take(unit.links)
        holdings.prepare_packs(unit.links, writer)
        progress.check()
        progress.phase("quiesce", stopped=True)
        point(Point.CHECKPOINT_QUIESCE)
        with closed_gates(unit.links, progress, options.deadline):
            for link in unit.links:
                if link.has_imports():
                    link.rehome()  # nobody holds descriptors of what was unparked earlier
            holdings.take(unit.links)
            progress.phase("digest", stopped=True)
            point(Point.CHECKPOINT_DIGEST)
            digests = holdings.digest()
            total = sum(held.block.size for held in holdings.distinct())
            progress.phase("drain", stopped=True, bytes_total=total)
            point(Point.CHECKPOINT_DRAIN)
            chunks = holdings.save(digests, writer, progress)
            progress.phase("park", stopped=True)
            point(Point.CHECKPOINT_PARK)
            with parked(unit.links, holdings):
                _save_processes(unit, cpu, holdings.movers(), progress)
        progress.finish()
        return _blocks(cpu, holdings, chunks)


def _driver(
    node: Node, unit: Unit, cpu: CpuParts, options: CheckpointOptions, progress: Progress
) -> None:
    """Mode ``driver``: the driver and CRIU save everything, memory included."""
    gpus = {gpu for pid in unit.gpu_pids for gpu in used_by(pid)}
    movers = [node.mover(gpu) for gpu in sorted(gpus)]
    parked_before = [link for link in unit.links if link.has_imports()]
    if parked_before:  # the driver does not bring imported memory back (hazard 7)
        progress.phase("quiesce", stopped=True)
        with closed_gates(parked_before, progress, options.deadline):
            for link in parked_before:
                link.rehome()
    progress.phase("detach")
    with detached(unit.links):
        _save_processes(unit, cpu, movers, progress)
    progress.finish()


def _save_processes(unit: Unit, cpu: CpuParts, movers: Sequence[Mover], progress: Progress) -> None:
    """The driver's part and CRIU's, and back again; ``movers`` keep the room on their GPUs."""
    progress.phase("control", stopped=True)
    point(Point.CHECKPOINT_CONTROL)
    with driver.checkpointed(unit.gpu_pids, room_kept(movers, progress)):
        progress.phase("cpu", stopped=True)
        point(Point.CHECKPOINT_CPU)
        cpu.dump(unit.trees, progress)
        progress.phase("unpark", stopped=True)
        point(Point.CHECKPOINT_UNPARK)
    _require_no_newcomers(unit, cpu)


def _require_no_newcomers(unit: Unit, cpu: CpuParts) -> None:
    """A process that began to use the GPU after the others were stopped was saved without it."""
    for found in (p for tree in cpu.trees for p in tree.living):
        if found.pid not in unit.gpu_pids and is_gpu_process(found.pid):
            raise Busy(
                f"process {found.pid} began to use the GPU during the checkpoint",
                hint="try again when the program has started all its processes",
            )


def _blocks(
    cpu: CpuParts, holdings: Holdings, chunks: dict[int, tuple[ChunkRef, ...]]
) -> tuple[Block, ...]:
    """The manifest's blocks. Memory that several blocks share is stored with the first."""
    index = {p.pid: i for i, p in enumerate(p for tree in cpu.trees for p in tree)}
    first: dict[int, Held] = {}
    blocks = []
    for held in holdings.all():
        owner = first.setdefault(held.key, held)
        alone = owner is held
        blocks.append(
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
    return tuple(blocks)


def _processes(unit: Unit, cpu: CpuParts, *, parked: bool) -> tuple[Process, ...]:
    members = {member.pid: member for member in unit.members}
    return tuple(
        process.record(
            number,
            gpu=process.pid in members,
            hooked=process.pid in members and members[process.pid].link is not None,
            parked=process.pid in members and parked,
        )
        for number, tree in enumerate(cpu.trees)
        for process in tree
    )


@contextmanager
def _death_explained(unit: Unit) -> Iterator[None]:
    """A failure whose cause is that the program ended says so."""
    try:
        yield
    except PhosError as error:
        ended = [p.pid for p in unit.essential if not p.alive]
        if not ended:
            raise
        death = NoSuchProcess(
            f"process {ended[0]} ended during its checkpoint ({error.what})",
            hint="nothing was saved; see the program's output for why it ended",
        )
        for note in getattr(error, "__notes__", ()):
            death.add_note(note)
        raise death from error
