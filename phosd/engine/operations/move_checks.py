"""Check a program before it is moved or suspended."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import used_by, users_of
from phosd.engine.node.known_drivers import require_safe
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import context_bytes
from phosd.engine.operations.permissions import require_may_save
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.own_processes import is_mover
from phosd.engine.program.process_gpus import gpu_uuids, unseen_gpus
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import device_nodes, procfs
from phosd.errors import Reason, Unsupported


def claimed(node: Node, job: ExitStack, caller: int) -> Callable[[ProcessTree], object]:
    """Return the check for each tree of the group; it also claims the tree for the job."""
    if not node.config.allow_unsafe_driver:
        require_safe()

    def check(tree: ProcessTree) -> None:
        require_may_save(tree, caller)
        node.suspended.require_awake(tree.pids)
        job.enter_context(node.claim(tree.pids))

    return check


def gpus_in_use(group: CheckpointGroup) -> dict[int, int]:
    """Return the bytes of blocks on each GPU where hooks or NVML see memory of the group."""
    used = {gpu: 0 for pid in group.gpu_pids for gpu in used_by(pid)}
    for member in group.members:
        for block in member.link.list_blocks() if member.link else ():
            if 0 <= block.device < len(member.gpus):
                gpu = member.gpus[block.device]
                used[gpu] = used.get(gpu, 0) + block.size
    if not used:  # neither hooks nor NVML tell: take the GPUs that the processes see
        used = dict.fromkeys((gpu for member in group.members for gpu in member.gpus), 0)
    return used


def require_alone(
    gpus: Collection[int], own: Collection[int], who: str = "processes that share device memory"
) -> None:
    """Raise :class:`Unsupported` if others compute on the GPUs of processes ``own``. ``who`` says
    what these are: kernels of those that share device memory wait for each other, as NCCL's do.

    Once the driver has restored them, a GPU interrupts none of their kernels any more, and beside
    others the driver ends them if one waits for another, or takes seconds (hazard 47).
    """
    for pid, gpu in users_of(gpus).items():
        if pid not in own and not is_mover(pid, ended=True):  # since NVML saw it
            raise Unsupported(
                f"{procfs.describe(pid)} uses GPU {gpu}, too: beside others, {who} would be ended "
                "after it, since a GPU no longer interrupts kernels of theirs",
                hint=f"end or suspend process {pid}, or give the program GPUs of its own",
                reason=Reason.BUSY_GPU,
            )


def require_alone_if_long(group: CheckpointGroup, *, long_kernels: bool) -> None:
    """Raise as :func:`require_alone` does for a program whose kernels take more than a second."""
    if long_kernels:
        require_alone(gpus_in_use(group), group.pids, "programs whose kernels take seconds")


def require_seen(pids: Collection[int], moves: Mapping[int, int]) -> None:
    """Raise :class:`Unsupported` if a process is in a container that lacks a GPU it is to get."""
    for pid in pids:
        if lacking := unseen_gpus(pid) & {*moves.values()}:
            gpu = min(lacking)
            raise Unsupported(
                f"{procfs.describe(pid)} is in a container that was not given GPU {gpu} "
                f"({device_nodes.device_of(gpu_uuids()[gpu])})",
                hint="choose a GPU of the container, or start the container with this one, too",
                reason=Reason.MISSING_DEVICE,
            )


def require_shareable(seen: Mapping[int, Collection[int]], there: Collection[int]) -> None:
    """Raise :class:`Unsupported` if processes that share device memory are to come to GPUs
    (``there``) that one of them does not see: the driver imports no memory for it then, and each
    would have memory of its own (hazard 58). ``seen``: the GPUs that each process saw, by pid.
    """
    for pid, gpus in seen.items():
        if unseen := {*there} - {*gpus}:
            raise Unsupported(
                f"{procfs.describe(pid)} shares device memory with other processes, and does not "
                f"see GPU {min(unseen)}: there the driver would not let it have their memory",
                hint="choose GPUs that it sees, or start it without CUDA_VISIBLE_DEVICES",
                reason=Reason.SHARED_MEMORY,
            )


def device_needs(group: CheckpointGroup, *, parks: bool) -> dict[int, int]:
    """Return the bytes that the group needs on each GPU, or on the GPU that replaces it: its blocks
    and contexts, or, if the driver saves everything, the figure of NVML if that is more.
    """
    contexts = context_bytes() * len(group.users)
    needs = {gpu: blocks + contexts for gpu, blocks in gpus_in_use(group).items()}
    for pid in () if parks else group.gpu_pids:
        for gpu, used in used_by(pid).items():
            needs[gpu] = max(needs[gpu], used)
    return needs


def bytes_in_use(group: CheckpointGroup) -> dict[int, int]:
    """Return the bytes on each GPU that the group uses: the figures of NVML, or of hooks."""
    by_nvml: Counter[int] = Counter()
    for pid in group.gpu_pids:
        by_nvml.update(used_by(pid))
    return {gpu: max(size, by_nvml[gpu]) for gpu, size in gpus_in_use(group).items()}


def may_park(group: CheckpointGroup, wanted: str, progress: Progress) -> bool:
    """Return whether the memory can be parked; if not, the driver saves it. Raises
    :class:`Unsupported` if mode ``wanted`` is impossible, or if no mode is possible.
    """
    why_not = group.why_not_parked()
    if wanted not in ("auto", "driver") and why_not:
        raise Unsupported(
            f"mode {wanted} is not possible: {why_not}",
            hint="use mode driver",
            reason=why_not.reason,
        )
    if not why_not and wanted != "driver":
        return True
    if why_not_driver := group.why_not_by_driver():
        raise Unsupported(
            f"mode driver is not possible: {why_not_driver}",
            hint="start it with `phos run`",
            reason=Reason.SHARED_MEMORY,
        )
    progress.note(f"mode driver: {why_not or 'as was asked for'}")
    return False
