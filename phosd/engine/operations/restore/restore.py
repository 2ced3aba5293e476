"""Restore the processes of an image (docs/design/protocols.md, Restore).

Nothing on the node is touched before every check has passed. CRIU works while the device memory is
loaded; nothing of the program runs before all of that has been hashed on its GPU, and CRIU's files,
too. Its gates open only after its state has been verified.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import BlockFlag, HookLink
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.store import Image
from phosd.engine.job.affected import AffectedProcess, AffectedSet, now
from phosd.engine.job.checks import Check, Finding, findings, require_all
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.node.image_placement import ImagePlacement
from phosd.engine.node.loaded_memory import LoadedMemory
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import UNLIMITED, DiskLimits
from phosd.engine.operations.move_checks import require_shareable
from phosd.engine.operations.restore.admission import Admission
from phosd.engine.operations.restore.beside_criu import BesideCriu
from phosd.engine.operations.restore.cpu_side import CpuSide
from phosd.engine.operations.restore.image_gpus import blocks_need, place, placed_image
from phosd.engine.operations.restore.left_hollow import Shelved, shelved
from phosd.engine.operations.restore.load import loaded
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.process import placed
from phosd.errors import Internal


@dataclass(frozen=True)
class RestoreResult:
    """The pids of the requested root and of all restored processes, and the duration in seconds."""

    pid: int
    pids: tuple[int, ...]
    seconds: float


def restore(
    node: Node,
    image_id: str,
    options: RestoreOptions,
    progress: Progress,
    limits: DiskLimits = UNLIMITED,
) -> RestoreResult:
    """Restore image ``image_id`` with its old pids, perhaps in a pid namespace, on its GPUs or
    others; or a clone of it. ``limits`` are those of the memory of one that is left hollow.
    """
    started = time.monotonic()
    progress.phase("admission")
    with ExitStack() as job:
        image = job.enter_context(node.store.open(image_id))
        manifest = image.manifest
        cpu = job.enter_context(CpuSide(node, manifest, options))
        job.enter_context(node.claim(cpu.pids_here))
        placement = _admitted(node, manifest, cpu, options, job)
        gpus = frozenset(placement.moves[block.gpu] for block in manifest.blocks)
        if placement.changed:
            progress.note(placement.text)
        progress.check()
        progress.about_to_touch(_affected(manifest, cpu.pids_here, gpus))

        if not options.hollow:
            node.movers.begin(gpus)
        phase = "copy" if options.hollow else "load"
        progress.phase(phase, bytes_total=manifest.device_bytes)
        point(Point.RESTORE_LOAD)
        bring = partial(_brought, node, image, placement, limits, hollow=options.hollow)
        beside = job.enter_context(BesideCriu(cpu, bring, progress))
        require_all(cpu.files_checks(progress))
        point(Point.RESTORE_CPU)
        with Undo() as undo:
            with beside.named_if_damaged():
                made = cpu.restore(progress, beside.complete, placement.pairs, beside.descriptor_of)
                for restored in made:
                    undo.add(restored.abandon)
            memory, manifest = beside.memory, cpu.as_restored()
            pids = tuple(p.pid for p in manifest.processes)
            job.enter_context(node.claim({*pids} - {*cpu.pids_here}))
            memory.belongs_to(cpu.ids)
            progress.phase("control")
            point(Point.RESTORE_CONTROL)
            with node.gpu_locks.locked(gpus, progress):
                _back_from_driver(manifest, placement)
            progress.phase("map")
            point(Point.RESTORE_MAP)
            links = [job.enter_context(link) for link in _woken_links(node, manifest)]
            for link in links:
                _require_placed(link, manifest, placement.moves)
                memory.hand_back(link)
            progress.phase("verify")
            point(Point.RESTORE_VERIFY)
            cpu.require_settled()
            _require_running(manifest)
            memory.conclude(manifest, links, undo)
            undo.forget()
        cpu.settle()
        cpu.tell_copies(progress)
        cpu.tell_files(progress)
        progress.finish()
    return RestoreResult(manifest.trees[0].root, pids, time.monotonic() - started)


def try_restore(
    node: Node, image_id: str, options: RestoreOptions, progress: Progress
) -> list[Finding]:
    """Return what a restore of the image checks before it begins; nothing is restored.

    Raises :class:`NoSuchImage` and :class:`ImageCorrupt`.
    """
    with node.store.open(image_id) as image:
        manifest = image.manifest
        with CpuSide(node, manifest, options) as cpu:

            def claim() -> None:
                with node.claim(cpu.pids_here):
                    pass

            def checks() -> Iterator[Check]:
                yield "jobs", claim
                hollow = options.hollow
                choose = partial(place, node, manifest, options.gpu, hollow=hollow)
                yield from Admission(node, manifest, cpu, choose, hollow=hollow).checks()
                yield from cpu.files_checks(progress)

            return findings(checks())


def _admitted(
    node: Node, manifest: Manifest, cpu: CpuSide, options: RestoreOptions, job: ExitStack
) -> ImagePlacement:
    """Check what a restore can check, and return its GPUs, on which ``job`` keeps it room."""
    choice = placed_image(node, manifest, options.gpu, hollow=options.hollow)
    choose = partial(job.enter_context, choice)
    admission = Admission(node, manifest, cpu, choose, hollow=options.hollow)
    require_all(admission.checks())
    return admission.placement


def _brought(
    node: Node,
    image: Image,
    placement: ImagePlacement,
    limits: DiskLimits,
    progress: Progress,
    *,
    hollow: bool,
) -> AbstractContextManager[LoadedMemory | Shelved]:
    """Return the context of the image's device memory: on its GPUs, or on a shelf."""
    if hollow:
        needs = blocks_need(image.manifest, placement.moves)
        return shelved(node, image, placement.moves, needs, limits, progress)
    return loaded(node, image, progress, placement.moves)


def _affected(manifest: Manifest, pids: Collection[int], gpus: Collection[int]) -> AffectedSet:
    """Return the processes that the restore will create on ``gpus``, of which these pids are known
    before.
    """
    processes = (
        AffectedProcess(p.pid, None, gpu=p.gpu, hooked=p.hooked)
        for p in manifest.processes
        if p.pid in pids
    )
    return AffectedSet(tuple(processes), tuple(sorted(gpus)), manifest.id, now())


def _back_from_driver(manifest: Manifest, placement: ImagePlacement) -> None:
    """Let the driver restore the GPU processes, as far as it has not while CRIU held them."""
    users = [p.pid for p in manifest.processes if p.gpu]
    if manifest.mode == "driver":
        driver_checkpoint.require_running(users)
    else:
        driver_checkpoint.resume(users, placement.pairs)


def _require_placed(link: HookLink, manifest: Manifest, moves: Mapping[int, int]) -> None:
    """Raise :class:`Internal` unless the driver has put a process on the GPUs on which its memory
    was loaded. It would not notice that it reaches that from another one. Raises
    :class:`Unsupported` if the process can only have memory of its own there, and must share it.
    """
    there = {
        block.id: gpu
        for block, gpu in placed(link.hello(), link.list_blocks())
        if gpu >= 0 and not block.flags & BlockFlag.HOST_LOCATED
    }
    for block in manifest.blocks:
        pid, gpu = manifest.processes[block.process].pid, moves[block.gpu]
        if pid == link.pid and there.get(block.id, gpu) != gpu:
            raise Internal(
                f"the driver has restored process {pid} on GPU {there[block.id]} instead of GPU"
                f" {gpu}",
                hint="restore it on the GPUs that it had (`--gpu`), and report this",
            )
    if manifest.shares_or_exports_memory and link.hello().makes_memory:
        require_shareable({link.pid: ()}, moves.values())


def _woken_links(node: Node, manifest: Manifest) -> Iterator[HookLink]:
    """Wake and connect to the hooks of the restored processes, which sleep since the dump."""
    for process in manifest.processes:
        if process.hooked:
            link = HookLink(process.pid, node.config.runtime_dir)
            link.reattach()
            yield link


def _require_running(manifest: Manifest) -> None:
    """Raise unless all processes run: CRIU may succeed and the program die a moment later."""
    for process in manifest.processes:
        if (
            process.gpu
            and (state := driver_checkpoint.state(process.pid))
            is not driver_checkpoint.State.RUNNING
        ):
            raise Internal(
                f"restored process {process.pid} is {state.name.lower() if state else 'gone'},"
                " not running",
                hint="see the program's output and the driver's log (dmesg)",
            )
