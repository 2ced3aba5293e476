"""Settle the jobs that an earlier phosd did not finish, and remove what they left."""

import contextlib
import logging
from collections.abc import Collection, Mapping
from functools import partial

from phosd.engine.criu.restore.private_copy import remove_left
from phosd.engine.criu.restore.saved_tree import restoring_user, saved_trees
from phosd.engine.criu.restore.tree_files import mend
from phosd.engine.criu.run import owned_processes
from phosd.engine.criu.run.folders import close_to_others
from phosd.engine.hook_client import places
from phosd.engine.hook_client.link import HookState, reach
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.manifest import Process as Restored
from phosd.engine.job.affected import InterruptedJob
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.program import driver_checkpoint, namespace_maker
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.recovery.account import Account
from phosd.engine.recovery.guarded import left_parked, let_rest
from phosd.engine.recovery.hollow import rests, stand_still
from phosd.engine.recovery.overdue import overdue
from phosd.engine.recovery.rescue import free
from phosd.engine.system import pid_namespaces
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, PhosError

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 5.0
"""Seconds that the hook of a restored process has to answer."""
_AGAIN = "start the job again"


def settle(node: Node, interrupted: Collection[InterruptedJob]) -> dict[int, str]:
    """Bring the processes of unfinished jobs back to running, and remove what the jobs left.

    Returns what was done, or could not be done, for each job. No other phosd may use the node's
    folders.
    """
    touched = {
        ProcessId(each.pid, each.start_time)
        for job in interrupted
        if job.affected is not None
        for each in job.affected.processes
        if each.start_time is not None
    }
    suspended = node.suspended.images()
    with overdue("thawing what is not suspended"):
        node.freezer.remove_left(lambda image: image not in suspended)
    with overdue("waiting for suspended programs to tell their state"):
        asleep, silent, woken = _suspended(node)
    let_rest({process for each in asleep for process in each.processes}, node.config.runtime_dir)
    for each in asleep:
        stand_still(node, each)
    rest = {process for each in (*asleep, *silent) for process in each.processes}
    waking = {process for each in woken for process in each.processes}
    left = left_parked(node.config.runtime_dir) | {each.id for each in node.stopped.living()}
    wanted = (touched | left | waking) - rest
    account = free(wanted, node.config.runtime_dir)
    for each in woken:
        _settle_resume(node, each, account)
    still = {pid: each.pid for each in (*asleep, *silent) for pid in each.pids}
    with overdue("settling restores that had begun"):
        for place in pid_namespaces.living(node.config.runtime_dir):
            if place.apart:
                namespace_maker.end(place)
        said = {job.job: _text(node, job, account, still) for job in interrupted}
    for what, clear in (
        ("sockets of hooks", partial(places.sweep, node.config.runtime_dir)),
        ("records of pid namespaces", partial(pid_namespaces.sweep, node.config.runtime_dir)),
        ("files in memory", node.staging.sweep),
        ("images", node.store.sweep),
        ("suspended programs", node.suspend_store.sweep),
        ("records of stopped processes", node.stopped.forget_the_dead),
    ):
        try:
            clear()
        # Leftovers only take space; the processes run.
        except (PhosError, OSError, RecursionError) as error:
            _log.error("%s that earlier jobs left could not be removed: %s", what, error)
    return said


def _suspended(node: Node) -> tuple[list[Suspended], list[Suspended], list[Suspended]]:
    """Return the programs that are suspended, those that only their file says this of, as they are
    stopped or do not tell, and those whose resume had begun.
    """
    asleep: list[Suspended] = []
    silent: list[Suspended] = []
    woken: list[Suspended] = []
    programs = list(node.suspended.living())
    with contextlib.ExitStack() as running:
        for each in programs:
            try:
                running.enter_context(node.stopped.restore_threads_run(each.pids))
            except PhosError as error:
                _log.warning("suspended process %d does not tell its state: %s", each.pid, error)
        told = driver_checkpoint.states(pid for each in programs for pid in each.pids)
    for each in programs:
        states = {told[pid] for pid in each.pids & told.keys()}
        if not states:
            silent.append(each)
        elif states <= {State.CHECKPOINTED, None}:
            asleep.append(each)
        elif states <= {State.RUNNING, None} and rests(each, node.config.runtime_dir):
            asleep.append(each)  # hollow, or nothing is left of what its resume had done
        else:
            woken.append(each)
    return asleep, silent, woken


def _settle_resume(node: Node, suspended: Suspended, account: Account) -> None:
    """Remove the file of a resumed program; if the resume failed, report it as suspended."""
    failed = suspended.pids & account.failures.keys()
    if not failed:
        node.suspended.remove(suspended)
    for pid in failed:
        account.failures[pid] = Busy(
            f"process {pid} is still suspended ({account.failures[pid].what})",
            hint=f"`phos resume {suspended.pid}`",
        )


def _text(node: Node, job: InterruptedJob, account: Account, asleep: Mapping[int, int]) -> str:
    """Say what became of a job. ``asleep`` maps processes to the roots of suspended programs."""
    if job.affected is None:
        return f"nothing had been touched; {_AGAIN}"
    if not job.affected.image:
        pids = [each.pid for each in job.affected.processes]
        if root := next((asleep[pid] for pid in pids if pid in asleep), 0):
            return f"process {root} is suspended; `phos resume {root}`"
        return f"{account.text(pids) or 'its processes run'}; {_AGAIN}"
    try:
        manifest = node.store.get(job.affected.image)
        return _settle_restore(node, manifest, job.affected.since, asleep)
    except PhosError as error:
        return f"what it may have restored is to be looked at: {error}"


def _settle_restore(node: Node, manifest: Manifest, since: int, asleep: Mapping[int, int]) -> str:
    """End a restored program that had not begun to run, unless it is suspended. The image still
    exists.
    """
    try:
        said = _settle_in_namespaces(node, manifest, since, asleep) or _settle_here(
            node, manifest, since, asleep
        )
        return said or f"nothing had been restored; {_AGAIN}"
    finally:
        folder = node.store.image_folder(manifest.id)
        for tree in manifest.trees:
            close_to_others(folder / tree.folder)
        remove_left(folder, {tree.folder for tree in manifest.trees})
        for saved in saved_trees(manifest, folder):
            mend(saved)


def _settle_in_namespaces(
    node: Node, manifest: Manifest, since: int, asleep: Mapping[int, int]
) -> str:
    """Do that for what was restored in pid namespaces. Returns an empty text if nothing was."""
    made = [
        each
        for each in pid_namespaces.living(node.config.runtime_dir)
        if each.image == manifest.id and each.keeper.start_time >= since
    ]
    if not made:
        return ""
    ids = {own: now for each in made for own, now in each.members().items()}
    there = {ids[p.pid]: p for p in manifest.processes if p.pid in ids}
    if asleep.keys() & there.keys():
        return _left_hollow(ids[manifest.trees[0].root])
    if len(there) == len(manifest.processes) and _restored_run(node, there):
        return f"the restored program (pid {ids[manifest.trees[0].root]}) runs"
    for each in made:
        namespace_maker.end(each)
    pids = ", ".join(map(str, sorted(there))) or "not known"
    return f"what was restored of it (pid {pids}) was ended; {_AGAIN}"


def _settle_here(node: Node, manifest: Manifest, since: int, asleep: Mapping[int, int]) -> str:
    """Do that for what has got the pids that it had. Returns an empty text if nothing has."""
    users = [restoring_user(tree).uid for tree in manifest.trees]
    wanted = {p.pid: p for p in manifest.processes if not manifest.trees[p.tree].pid_namespace}

    def ours(pid: int) -> bool:
        return owned_processes.is_made(wanted[pid], users[wanted[pid].tree], since)

    # Processes that CRIU has restored survive it; the code below ends them.
    roots = [str(tree.root) for tree in manifest.trees if not tree.pid_namespace]
    owned_processes.end_restoring(roots, since)
    made = {pid: wanted[pid] for pid in wanted if ours(pid)}
    if not made:
        return ""
    if asleep.keys() & made.keys():
        return _left_hollow(manifest.trees[0].root)
    if len(made) == len(manifest.processes) and _restored_run(node, made):
        return f"the restored program (pid {manifest.trees[0].root}) runs"
    owned_processes.end(made, ours)
    pids = ", ".join(map(str, sorted(made)))
    return f"what was restored of it (pid {pids}) was ended; {_AGAIN}"


def _left_hollow(root: int) -> str:
    return f"the restored program (pid {root}) is suspended, as it was to be"


def _restored_run(node: Node, made: Mapping[int, Restored]) -> bool:
    for pid, recorded in made.items():
        if recorded.gpu and not _runs(pid):
            return False
        if recorded.hooked:
            try:
                with reach(pid, node.config.runtime_dir, _ANSWER_SECONDS) as link:
                    if link.hello().state is HookState.PARKED:
                        return False
            except PhosError:
                return False
    return True


def _runs(pid: int) -> bool:
    """Return whether the driver reports the process as running, within ``_ANSWER_SECONDS``.

    It cannot answer if CRIU was killed before it released the process.
    """
    told = driver_checkpoint.states([pid], _ANSWER_SECONDS)
    return told.get(pid) is State.RUNNING
