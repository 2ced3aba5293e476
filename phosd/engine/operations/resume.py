"""Resume a suspended program, on its GPUs or others (docs/design/protocols.md, Resume).

Every step first looks how far an earlier attempt came, so a resume that failed or was killed can be
repeated. The stored data stay until the program runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import HookLink, HookState, reach
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.store import Image
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.coming_back import (
    affected_by,
    back_from_driver,
    hooked,
    require_resumable,
    rest_reserved,
)
from phosd.engine.operations.hollow import rise, sunk
from phosd.engine.operations.permissions import ROOT
from phosd.engine.operations.pinned_shelf import forget_removed
from phosd.engine.operations.places_back import (
    away,
    chosen_moves,
    gpus_as_before,
    is_frozen,
    moved_before,
    now_on,
    roomy,
    with_earlier_moves,
)
from phosd.engine.operations.restore.load import LoadedMemory, loaded
from phosd.engine.operations.standing_still import thawing
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery.guarded import kept_for
from phosd.engine.recovery.rescue import free
from phosd.errors import Busy, Internal, PhosError, Reason, Unsupported


class ResumeChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a resumption that users may set.

    ``gpu``: one GPU, or ``OLD:NEW`` for each of several; empty for the GPUs that it had.
    ``hollow``: its contexts come back to the GPUs that it had, and its memory does not.
    """

    gpu: str = ""
    hollow: bool = False


class ResumeOptions(ResumeChoices, frozen=True):
    """Options of a resumption: the user's, and those that phosd adds."""

    caller: int = ROOT
    """The user id that requested it. Only root may resume programs of other users."""


def resume(node: Node, pid: int, options: ResumeOptions, progress: Progress) -> dict[int, int]:
    """Resume the suspended program of process ``pid``.

    Returns the ordinal of each GPU that it had, with that of the GPU that it has now. Raises
    :class:`NoSuchProcess` if it is not suspended. If anything fails, it stays suspended.
    """
    progress.phase("admission")
    with ExitStack() as after, ExitStack() as job:
        suspended = node.suspended.of(pid)
        after.enter_context(_death_explained(suspended))
        thaw = _claimed(node, job, suspended, options.caller)
        if not options.gpu:  # most of its start goes by while the image is opened
            node.movers.begin(suspended.gpus)
        image = job.enter_context(_opened(node, suspended))
        manifest = image.manifest = _with_pids(image.manifest, suspended)
        suspended, further = _as_the_driver_says(node, suspended)
        if options.hollow:
            return _risen(node, suspended, manifest, options.gpu, progress, back=further)
        connected = job.enter_context(ExitStack())
        links = _awake(node, suspended, manifest, connected) if further else []
        if further and _begun(node, suspended, links):
            connected.close()
            moves = _end_begun(node, suspended, manifest, progress, thaw)
            after.callback(_delete, node, suspended)
            return moves
        gpus = gpus_as_before(manifest)
        chosen = chosen_moves(options.gpu, suspended, gpus) if options.gpu else {}
        moves = with_earlier_moves(node, suspended, manifest, chosen, links, back=further)
        blocks, needs = roomy(node, suspended, manifest, moves, further=further)
        affected = affected_by(suspended, hooked(manifest), moves)
        progress.about_to_touch(affected)
        progress.phase("load", bytes_total=manifest.device_bytes)
        point(Point.RESUME_LOAD)
        memory = job.enter_context(loaded(node, image, progress, moves))
        release = job.enter_context(rest_reserved(node, suspended, needs, blocks))
        progress.check()
        untouched = job.enter_context(ExitStack())
        # A failed resume is repeated from here, and needs the room.
        untouched.callback(memory.unguard)
        memory.guard()
        progress.phase("control")
        point(Point.RESUME_CONTROL)
        with node.gpu_locks.locked(affected.gpus, progress):
            release()
            thaw()  # from here on the driver and the hooks need its threads
            if not further:
                progress.about_to_touch(replace(affected, moves=moves))
                back_from_driver(node.stopped, suspended, moves, gpus)
        progress.phase("map")
        point(Point.RESUME_MAP)
        links = links or _connected(node, manifest, connected)
        job.push(connected.pop_all())  # they close before memory is freed
        parked = _all_parked(manifest, links)
        # From here on hooks have some of the memory, and a repeated resume continues with it.
        untouched.pop_all()
        _give_memory(parked, memory)
        node.suspended.remove(suspended)  # from here on it counts as running, even if phosd dies
        after.callback(_delete, node, suspended)
        job.callback(memory.unguard)
        if not further or parked == links:  # else it is unknown which blocks a hook had already
            memory.keep(links)
        _open(links)
        progress.phase("release")
    progress.finish()
    return now_on(suspended, moves)


def _delete(node: Node, resumed: Suspended) -> None:
    node.suspend_store.shelf_of(resumed).delete(resumed.image)
    forget_removed(node, resumed)


def _opened(node: Node, suspended: Suspended) -> AbstractContextManager[Image]:
    shelf = node.suspend_store.shelf_of(suspended)
    return shelf.open(suspended.image, known=True)


def _claimed(node: Node, job: ExitStack, suspended: Suspended, caller: int) -> Callable[[], None]:
    """Claim the program for the job, if ``caller`` may resume it. Returns what thaws it."""
    job.enter_context(node.claim(suspended.pids))
    require_resumable(suspended, caller)
    return job.enter_context(thawing(node, suspended))


def _as_the_driver_says(node: Node, suspended: Suspended) -> tuple[Suspended, bool]:
    """Return the program's entry, and :func:`_driver_is_done`: who is still hollow by the entry,
    and not by the driver, is so no more. A job that was to suspend it wholly was killed.
    """
    back = _driver_is_done(node, suspended)
    if suspended.hollow and not back:
        suspended = sunk(node, suspended)
        node.suspended.write(suspended)
    return suspended, back


def _with_pids(manifest: Manifest, suspended: Suspended) -> Manifest:
    """Return the manifest with the pids that its processes have now."""
    replace, known = msgspec.structs.replace, suspended.known
    if not known:
        return manifest
    return replace(
        manifest,
        trees=tuple(replace(tree, root=known.get(tree.root, tree.root)) for tree in manifest.trees),
        processes=tuple(
            replace(each, pid=known.get(each.pid, each.pid)) for each in manifest.processes
        ),
    )


@contextmanager
def _death_explained(suspended: Suspended) -> Iterator[None]:
    """Replace an error raised inside by one that says that the program ended, if it did."""
    try:
        yield
    except PhosError:
        suspended.require_alive()
        raise


def _risen(
    node: Node,
    suspended: Suspended,
    manifest: Manifest,
    gpu: str,
    progress: Progress,
    *,
    back: bool,
) -> dict[int, int]:
    """Return what :func:`rise` does. Raises :class:`Busy` if an earlier attempt has brought some of
    the program to other GPUs, where the rest must come, too.
    """
    if moves := away(moved_before(node, suspended, manifest)):
        raise Busy(
            f"some of the program of process {suspended.pid} is on GPU {min(moves.values())} by an "
            "earlier resumption, which has not ended",
            hint=f"`phos resume {suspended.pid}` first",
        )
    return rise(node, suspended, manifest, gpu, progress, back=back)


def _awake(node: Node, suspended: Suspended, manifest: Manifest, job: ExitStack) -> list[HookLink]:
    """Return what :func:`_connected` does, and nothing of a program that is frozen."""
    return [] if is_frozen(suspended) else _connected(node, manifest, job)


def _connected(node: Node, manifest: Manifest, job: ExitStack) -> list[HookLink]:
    """Connect to the hooks of the processes whose memory was parked, until the job ends."""
    return [
        job.enter_context(reach(process.pid, node.config.runtime_dir))
        for process in manifest.processes
        if process.gpu and process.parked and process.hooked
    ]


def _open(links: Iterable[HookLink]) -> None:
    point(Point.RESUME_OPEN)
    for link in links:
        link.open_gate()


def _give_memory(links: Sequence[HookLink], memory: LoadedMemory) -> None:
    """Ask the hooks to map the memory. Their gates stay closed while they are connected."""
    for link in links:
        memory.hand_back(link)
        if (state := link.hello().state) is HookState.PARKED:
            raise Internal(
                f"the memory of process {link.pid} is still {state.name.lower()}",
                hint=f"`phos resume {link.pid}` again, and report this",
            )


def _all_parked(manifest: Manifest, links: Sequence[HookLink]) -> list[HookLink]:
    """Return the hooks whose memory is parked. Raises :class:`Unsupported` unless processes that
    share memory are all parked, or none of them is.
    """
    found = [link for link in links if link.hello().state is HookState.PARKED]
    _require_together(manifest, {link.pid for link in found})
    return found


def _require_together(manifest: Manifest, parked: Collection[int]) -> None:
    for block in manifest.blocks:
        if block.alias is not None:
            pids = [manifest.processes[n].pid for n in (block.process, block.alias[0])]
            waiting = [pid for pid in pids if pid in parked]
            if len(waiting) == 1:
                raise Unsupported(
                    f"process {waiting[0]} is parked, but the memory that it shares was given"
                    " back to other processes already, and phosd no longer holds it",
                    hint=f"end process {waiting[0]}, and restore an image of the program",
                    reason=Reason.SHARED_MEMORY,
                )


def _driver_is_done(node: Node, suspended: Suspended) -> bool:
    """Return whether the driver restored all processes in an earlier attempt, and none is stopped.
    Raises :class:`Busy` if others than phosd have stopped one.
    """
    stopped = {each.pid for each in node.stopped.of(suspended.pids)}
    for each in suspended.pids - stopped:
        node.stopped.require_going(each)
    return not stopped and all(
        driver_checkpoint.state(pid) is driver_checkpoint.State.RUNNING for pid in suspended.pids
    )


def _begun(node: Node, suspended: Suspended, links: Iterable[HookLink]) -> bool:
    """Return whether an earlier attempt gave hooks memory, or some of it.

    The movers then still have all of it, and only that memory will do: a fresh copy would not be
    the memory that the processes share, or that a hook has imported already.
    """
    if kept_for(suspended.processes, node.config.runtime_dir):
        return True
    if is_frozen(suspended):
        return False
    return all(link.hello().state is not HookState.PARKED for link in links)


def _end_begun(
    node: Node,
    suspended: Suspended,
    manifest: Manifest,
    progress: Progress,
    thaw: Callable[[], None],
) -> dict[int, int]:
    """Give the hooks the rest of the memory that an earlier attempt loaded. Returns GPU moves."""
    moves = away(moved_before(node, suspended, manifest))
    progress.about_to_touch(affected_by(suspended, hooked(manifest), moves))
    progress.phase("map")
    thaw()
    account = free(suspended.processes, node.config.runtime_dir)
    if account.failures:
        raise next(iter(account.failures.values()))
    node.suspended.remove(suspended)
    progress.finish()
    return now_on(suspended, moves)
