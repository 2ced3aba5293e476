"""Resume a suspended program, on its GPUs or others (docs/design/protocols.md, Resume).

Every step first looks how far an earlier attempt came, so a resume that failed or was killed can be
repeated. The stored data stay until the program runs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.store import Image
from phosd.engine.job.progress import Progress
from phosd.engine.node.loaded_memory import LoadedMemory
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.coming_back import require_resumable, require_room, rest_reserved
from phosd.engine.operations.hollow import rise, sunk
from phosd.engine.operations.permissions import ROOT
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
from phosd.engine.operations.ready import make_ready
from phosd.engine.operations.restore.load import loaded
from phosd.engine.operations.run_again import Return
from phosd.engine.operations.standing_still import thawing
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery.guarded import kept_for
from phosd.engine.recovery.rescue import free
from phosd.errors import Busy, InvalidOption, PhosError


class ResumeChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a resumption that users may set.

    ``gpu``: one GPU, or ``OLD:NEW`` for each of several; empty for the GPUs that it had.
    ``hollow``: its contexts come back to the GPUs that it had, and its memory does not. ``ready``:
    its memory does, too, and it does not run yet.
    """

    gpu: str = ""
    hollow: bool = False
    ready: bool = False


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
        suspended, further = _as_the_driver_says(node, suspended)
        waits = options.hollow or options.ready
        ready = None if waits else job.enter_context(node.readied.taken(suspended))
        if ready is not None and not options.gpu:
            back = Return(node, suspended, ready.manifest, thaw, job, after, further=True)
            moved = _run_ready(back, ready.memory, progress)
        else:
            if ready is not None:
                ready.held.close()
            image = job.enter_context(_opened(node, suspended))
            manifest = image.manifest = _with_pids(image.manifest, suspended)
            if waits:
                return _waiting(node, suspended, image, options, progress, back=further)
            back = Return(node, suspended, manifest, thaw, job, after, further=further)
            moved = _load_and_run(back, image, options.gpu, progress)
    progress.finish()
    return moved


def _run_ready(back: Return, memory: LoadedMemory, progress: Progress) -> dict[int, int]:
    """Let a program run whose memory is loaded already, and whose GPUs are as they were."""
    node, suspended = back.node, back.suspended
    require_room(node, suspended, back.manifest, dict.fromkeys(suspended.gpus, 0), {})
    back.announce(progress, {})
    return back.run(memory, lambda: None, {}, (), progress)


def _load_and_run(back: Return, image: Image, gpu: str, progress: Progress) -> dict[int, int]:
    """Load the memory, and let the program run; or end what an earlier attempt has begun."""
    node, suspended, manifest = back.node, back.suspended, back.manifest
    if back.further and not is_frozen(suspended):
        back.connect()
    if back.further and _begun(node, suspended, back.links):
        back.connected.close()
        return _end_begun(back, progress)
    gpus = gpus_as_before(manifest)
    chosen = chosen_moves(gpu, suspended, gpus) if gpu else {}
    moves = with_earlier_moves(node, suspended, manifest, chosen, back.links, back=back.further)
    blocks, needs = roomy(node, suspended, manifest, moves, further=back.further)
    back.announce(progress, moves)
    progress.phase("load", bytes_total=manifest.device_bytes)
    point(Point.RESUME_LOAD)
    memory = back.job.enter_context(loaded(node, image, progress, moves))
    release = back.job.enter_context(rest_reserved(node, suspended, needs, blocks))
    return back.run(memory, release, moves, gpus, progress)


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


def _waiting(
    node: Node,
    suspended: Suspended,
    image: Image,
    options: ResumeOptions,
    progress: Progress,
    *,
    back: bool,
) -> dict[int, int]:
    """Bring the program back without letting it run: hollow, or ready. Raises :class:`Busy` if an
    earlier attempt has brought some of it to other GPUs, where the rest must come, too.
    """
    if options.hollow and options.ready:
        raise InvalidOption(
            "hollow and ready are two levels", hint="ready is hollow, with its memory on its GPUs"
        )
    if options.ready and options.gpu:
        raise InvalidOption(
            "a program can be ready only where its contexts are",
            hint=f"without `gpu`; or `phos resume {suspended.pid} --gpu {options.gpu}`",
        )
    if moves := away(moved_before(node, suspended, image.manifest)):
        raise Busy(
            f"some of the program of process {suspended.pid} is on GPU {min(moves.values())} by an "
            "earlier resumption, which has not ended",
            hint=f"`phos resume {suspended.pid}` first",
        )
    if options.ready and kept_for(suspended.processes, node.config.runtime_dir):
        raise Busy(
            f"an earlier resumption of process {suspended.pid} has loaded its memory, and has not "
            "ended",
            hint=f"`phos resume {suspended.pid}` ends it",
        )
    if options.ready and suspended.hollow:
        return make_ready(node, suspended, image, progress)
    moves = rise(node, suspended, image.manifest, options.gpu, progress, back=back)
    if options.ready:
        return make_ready(node, node.suspended.of(suspended.pid), image, progress)
    return moves


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


def _end_begun(back: Return, progress: Progress) -> dict[int, int]:
    """Give the hooks the rest of the memory that an earlier attempt loaded. Returns GPU moves."""
    node, suspended = back.node, back.suspended
    moves = away(moved_before(node, suspended, back.manifest))
    back.announce(progress, moves)
    progress.phase("map")
    back.thaw()
    account = free(suspended.processes, node.config.runtime_dir)
    if account.failures:
        raise next(iter(account.failures.values()))
    node.suspended.remove(suspended)
    back.forget_stored()
    return now_on(suspended, moves)
