"""Find processes that nobody works on or has suspended, and that do not run on by themselves."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.hook_client.link import WAKE_SECONDS, HookLink, HookState
from phosd.engine.node.suspended import Register
from phosd.engine.program import driver_checkpoint, process
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.recovery.hollow import rests
from phosd.engine.recovery.rescue import worked_on
from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.freezer import frozen_for
from phosd.engine.system.instance_lock import in_use
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS, owner
from phosd.errors import PhosError

_NOT_SEEN = "not known: it, or another one of its user, holds up whoever looks at it"


@dataclass(frozen=True)
class Stranded:
    """A process that does not run on by itself. ``why`` completes "process 7 is ...".

    ``certain`` is false for one that does not let itself be looked at.
    """

    pid: int
    start_time: int
    why: str
    certain: bool = True


def stranded(runtime_dir: Path) -> list[Stranded]:
    """Return the GPU processes that are stopped, except by a running job.

    Only the owner of the runtime folder can tell suspended processes, and those under a job, from
    stranded ones. For other users, processes that the driver has checkpointed are left out, and
    those in pid namespaces whose hooks only root can reach.
    """
    ours = os.access(runtime_dir, os.W_OK) or not runtime_dir.exists()
    busy = worked_on(runtime_dir) if ours and in_use(runtime_dir) else {}
    programs = Register(runtime_dir).living() if ours else []
    suspended = {pid for each in programs for pid in each.pids}
    images = {each.image for each in programs}
    hollow = [each for each in programs if each.hollow and not each.pids & busy.keys()]
    resting = {pid for each in hollow if rests(each, runtime_dir) for pid in each.pids}
    stopped = StoppedProcesses(runtime_dir).living() if ours else []
    found = [
        Stranded(*each.id, "stopped by phosd for a job that did not end")
        for each in stopped
        if each.pid not in busy and each.pid not in suspended
    ]
    pids = sorted({*procfs.pids()} - {os.getpid(), *busy} - {each.pid for each in stopped})
    looks = dict(ABANDONABLE_THREADS.each(pids, _look))
    for pid, (state, place) in looks.items():
        asleep = pid in suspended or not ours
        if (asleep and state is driver_checkpoint.State.CHECKPOINTED) or pid in resting:
            continue
        known = procfs.process_id(pid)
        hooked = place == runtime_dir
        if image := frozen_for(pid):
            if known is not None and ours and hooked and image not in images:
                found.append(Stranded(*known, "frozen by phosd for a job that did not end"))
            continue
        why = _why_stranded(pid, state, runtime_dir, hooked=hooked) if known is not None else ""
        if known is not None and why:
            found.append(Stranded(*known, why))
    return found + _not_seen(pid for pid in pids if pid not in looks)


def _not_seen(pids: Iterable[int]) -> list[Stranded]:
    """Return root's that could not be looked at, and one of each other user."""
    found: dict[tuple[int, int], ProcessId] = {}
    for pid in pids:
        if (process_id := procfs.process_id(pid)) is not None:
            uid = owner(pid)
            found.setdefault((uid, 0 if uid else pid), process_id)
    return [Stranded(*each, _NOT_SEEN, certain=False) for each in found.values()]


def _look(pid: int) -> tuple[driver_checkpoint.State | None, Path | None]:
    """Return the driver's state of a process that was not stopped by its user, and the runtime
    folder of its hook.
    """
    stat = procfs.stat(pid)
    if stat is None or stat.stopped or not process.uses_cuda(pid):
        return None, None
    return driver_checkpoint.state(pid), process.hook_place(pid)


def _why_stranded(
    pid: int, state: driver_checkpoint.State | None, runtime_dir: Path, *, hooked: bool
) -> str:
    if state is driver_checkpoint.State.FAILED:
        return "lost: the driver could not bring it back"
    if state is driver_checkpoint.State.UNKNOWN:
        return "not known: the driver answers with an error"
    if state not in (None, driver_checkpoint.State.RUNNING):
        return f"{state.name.lower()} by the driver's checkpoint"
    if state is None or not hooked:
        return ""
    try:
        with HookLink(pid, runtime_dir, WAKE_SECONDS) as link:
            return "parked" if link.hello().state is HookState.PARKED else ""
    except PhosError:
        if os.geteuid() != 0 and _is_nested(pid):
            return ""  # root alone may enter the folder where it listens
        # It may be detached, as a parked hook is; only waking it would tell.
        return "perhaps parked: its hook does not answer"


def _is_nested(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pid_namespaces.is_nested(pid)
    return False
