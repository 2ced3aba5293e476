"""Find the group of processes that share device memory, from one of them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.wire import MAX_EXPORTED
from phosd.engine.memory.exported import SHARED
from phosd.engine.program import process
from phosd.engine.program.group import TIMEOUT, CheckpointGroup
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.program.tree import ProcessTree, scan
from phosd.engine.system import procfs
from phosd.engine.system.freezer import frozen_for
from phosd.engine.system.kcmp import same_file
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS, owner
from phosd.errors import Busy, NoSuchProcess, PhosError, Reason, Unsupported

_MOST_BORROWED = 1 << 14
"""Most blocks that such a process may hand out."""


@contextlib.contextmanager
def discover_group(
    pid: int, runtime_dir: Path, check: Callable[[ProcessTree], object]
) -> Iterator[CheckpointGroup]:
    """Find the group of the process tree with root ``pid``, and connect to its hooks.

    ``check`` raises if a tree cannot be saved, before its processes are queried. Raises
    :class:`NoSuchProcess` if there is no such process, or no GPU process in its tree.
    """
    group = CheckpointGroup(runtime_dir, check)
    with contextlib.closing(group):
        group.add_tree(scan(pid))
        if not group.members:
            raise NoSuchProcess(
                f"neither process {pid} nor a child of it is a GPU process",
                hint="wait until it has used its GPU for the first time: `phos ps` lists it then",
            )
        _add_sharers(group)
        yield group


def _add_sharers(group: CheckpointGroup) -> None:
    """Add the trees of hooked processes that share device memory with the group, transitively."""
    with contextlib.ExitStack() as borrowed:
        ours = [fd for link in group.links for fd in _shared(link, borrowed)]
        others = _other_sharers(group, borrowed) if ours else {}
        while joined := [
            pid
            for pid, theirs in others.items()
            if any(same_file(a, b) for a in ours for b in theirs)
        ]:
            for pid in joined:
                _join(group, pid)
            for pid in others.keys() & set(group.pids):
                ours += others.pop(pid)


def _join(group: CheckpointGroup, pid: int) -> None:
    if pid in group.pids:
        return
    tree = scan(pid)
    if below := set(tree.pids) & set(group.pids):
        raise Unsupported(
            f"process {pid} shares device memory with process {min(below)}, which is below it",
            hint=f"checkpoint process {pid}, which saves both",
            reason=Reason.SHARED_MEMORY,
        )
    group.add_tree(tree)


def _other_sharers(group: CheckpointGroup, borrowed: contextlib.ExitStack) -> dict[int, list[int]]:
    """Return descriptors of the shared memory of every other hooked process, by pid."""
    users = {p.uid for tree in group.trees for p in tree.living}
    found = {}
    # A process that the driver alone has suspended shares no memory; its hook may be stopped.
    asleep = {each.pid for each in StoppedProcesses(group.runtime_dir).living()}
    hooks = [pid for pid in group.other_hooks() if pid not in asleep]
    seen = dict(ABANDONABLE_THREADS.each(hooks, process.uses_cuda))
    for pid in hooks:
        if pid not in seen and owner(pid) in users:
            raise Busy(
                f"process {pid}, which may share device memory with it, cannot be looked at",
                hint="see what it, or the file system that it uses, waits for",
            )
        if not seen.get(pid) or frozen_for(pid):  # one that is frozen is parked, as below
            continue
        try:
            with HookLink(pid, group.runtime_dir, TIMEOUT) as other:
                found[pid] = _shared(other, borrowed, _MOST_BORROWED)
        except NoSuchProcess:
            continue  # ended, or without a hook
        except Busy:
            continue  # parked, and so are all that it shares with: none of them is ours
        except PhosError:
            # A program of another user must not be able to block the job with invalid answers.
            if procfs.status(pid).uids[0] in users:
                raise
    return {pid: descriptors for pid, descriptors in found.items() if descriptors}


def _shared(link: HookLink, borrowed: contextlib.ExitStack, most: int = MAX_EXPORTED) -> list[int]:
    """Return descriptors of the memory that the process exported or imported."""
    ids = [b.id for b in link.list_blocks() if b.flags & SHARED]
    found = []
    if ids:
        for block, descriptor in link.export_blocks(ids[0] - 1, most):
            if descriptor is None:
                continue
            if block.flags & SHARED:
                borrowed.callback(os.close, descriptor)
                found.append(descriptor)
            else:
                os.close(descriptor)
    return found
