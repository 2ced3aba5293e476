"""Say on which GPUs a suspended program comes back, and whether they have room."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from phosd.engine.hook_client.link import HookLink, reach
from phosd.engine.image.manifest import Manifest
from phosd.engine.node.gpus import GpuInfo, list_gpus
from phosd.engine.node.node import Node
from phosd.engine.node.placement import parse_moves, require_fit
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.coming_back import require_room
from phosd.engine.operations.move_checks import require_seen
from phosd.engine.operations.restore.load import device_bytes
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.process import placed
from phosd.engine.system.freezer import frozen_for
from phosd.errors import InvalidOption, Reason, Unsupported


def now_on(suspended: Suspended, moves: Mapping[int, int]) -> dict[int, int]:
    """Return the GPU that the program has now, by each that it had."""
    return {gpu: moves.get(gpu, gpu) for gpu in suspended.gpus}


def gpus_as_before(manifest: Manifest) -> list[GpuInfo]:
    """Return the GPUs here. Raises :class:`InvalidOption` unless those that the program had are
    numbered as they were.
    """
    gpus = list_gpus()
    known = {gpu.ordinal: gpu.uuid for gpu in gpus}
    for gpu in manifest.gpus:
        if known.get(gpu.ordinal) != gpu.uuid:
            raise InvalidOption(
                f"GPU {gpu.ordinal} is not {gpu.uuid} any more, which the program had",
                hint="bring the GPUs back into their order",
            )
    return gpus


def chosen_moves(text: str, suspended: Suspended, gpus: Sequence[GpuInfo]) -> dict[int, int]:
    """Return the GPUs to move to, by the GPUs that they replace."""
    moves = parse_moves(text, suspended.gpus, gpus, may_stay=True)
    require_fit(moves, gpus)
    require_seen(suspended.pids, moves)
    return moves


def with_earlier_moves(
    node: Node,
    suspended: Suspended,
    manifest: Manifest,
    chosen: Mapping[int, int],
    links: Sequence[HookLink],
    *,
    back: bool,
) -> dict[int, int]:
    """Return the ``chosen`` moves, and those that an earlier attempt made, which count, by the
    ``links`` to its hooks, if there are some. Raises :class:`Unsupported` if a hollow program of
    which the driver has nothing (``back``) is to come to GPUs where its contexts are not.
    """
    before = _places(manifest, links) if links else moved_before(node, suspended, manifest)
    for old, new in chosen.items() if suspended.hollow and back else ():
        if (now := before.get(old, old)) != new:
            raise Unsupported(
                f"the contexts of process {suspended.pid} are on GPU {now}, where alone it can be "
                "resumed",
                hint=f"`phos suspend {suspended.pid}` takes them off, too; then resume it on GPU "
                f"{new}",
                reason=Reason.PROCESS_STATE,
            )
    return away({**chosen, **before})


def roomy(
    node: Node,
    suspended: Suspended,
    manifest: Manifest,
    moves: Mapping[int, int],
    *,
    further: bool,
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes of blocks, and all that the driver needs, on each GPU; see that there is
    room.
    """
    blocks = device_bytes(manifest, moves)
    needs = blocks if further else _needs(suspended, blocks, moves)
    node.movers.begin(needs)
    require_room(node, suspended, manifest, needs, moves)
    return blocks, needs


def _needs(
    suspended: Suspended, blocks: Mapping[int, int], moves: Mapping[int, int]
) -> dict[int, int]:
    """Return the bytes that each GPU needs: those of the ``blocks``, or what the program had, of
    which the driver has a part. A GPU may need more than when the program was suspended.
    """
    needs = dict(blocks)
    for gpu, size in suspended.device_bytes.items():
        needs[moves.get(gpu, gpu)] = max(size, blocks.get(moves.get(gpu, gpu), 0))
    return needs


def moved_before(node: Node, suspended: Suspended, manifest: Manifest) -> dict[int, int]:
    """Return the GPU moves of processes that the driver restored in an earlier attempt, but for
    those that are stopped: nothing of theirs is parked that would have to follow.

    A program that is frozen became hollow where it was.
    """
    if is_frozen(suspended):
        return {}
    stopped = {each.pid for each in node.stopped.of(suspended.pids)}
    awake = {
        p
        for p in suspended.pids - stopped
        if driver_checkpoint.state(p) is not driver_checkpoint.State.CHECKPOINTED
    }
    driver_checkpoint.require_running(awake)
    parked = {process.pid for process in manifest.processes if process.parked}
    with ExitStack() as opened:
        runtime_dir = node.config.runtime_dir
        links = [opened.enter_context(reach(pid, runtime_dir)) for pid in awake & parked]
        return _places(manifest, links)


def _places(manifest: Manifest, links: Iterable[HookLink]) -> dict[int, int]:
    """Return the GPU on which the memory of these processes belongs now, by that of the image."""
    moves = {}
    for link in links:
        places = {block.id: gpu for block, gpu in placed(link.hello(), link.list_blocks())}
        for block in manifest.blocks:
            if manifest.processes[block.process].pid == link.pid and block.id in places:
                moves[block.gpu] = places[block.id]
    return moves


def is_frozen(suspended: Suspended) -> bool:
    return any(frozen_for(pid) == suspended.image for pid in suspended.pids)


def away(moves: Mapping[int, int]) -> dict[int, int]:
    return {old: new for old, new in moves.items() if old != new}
