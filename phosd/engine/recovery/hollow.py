"""Tell a hollow program, which its gates alone keep still, from one that is on its way back."""

import logging
from pathlib import Path

import msgspec

from phosd.engine.hook_client.link import HookState, reach
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import HOLLOW, Suspended
from phosd.engine.program import driver_checkpoint, process
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.recovery.guarded import kept_for
from phosd.engine.system.freezer import frozen_for
from phosd.errors import PhosError

_ANSWER_SECONDS = 5.0
_log = logging.getLogger(__name__)


def rests(suspended: Suspended, runtime_dir: Path) -> bool:
    """Return whether a suspended program whose processes the driver has brought back, or has never
    had, has nothing of its memory: all of its hooks are parked, and no mover keeps any for it. Then
    its image has it, and a resume begins anew.

    One that is frozen for its image is not asked: its hooks were parked before, and a resume thaws
    it before it gives them anything.

    False where a hook or a mover does not answer, or no process has a hook.
    """
    parked = 0
    try:
        if kept_for(suspended.processes, runtime_dir):
            return False
        for pid in sorted(suspended.pids):
            if frozen_for(pid) == suspended.image:
                parked += 1
                continue
            if process.has_only_nvml(pid):
                continue
            with reach(pid, runtime_dir, _ANSWER_SECONDS) as link:
                if link.hello().state is not HookState.PARKED:
                    return False
                parked += 1
    except PhosError:
        return False
    return parked > 0


def stand_still(node: Node, suspended: Suspended) -> None:
    """Freeze a program that rests, if it is hollow, and thaw it if it is not: a job that was to do
    so was killed in the middle, or an earlier phosd froze none. One that cannot be frozen is hollow
    all the same.
    """
    told = {*driver_checkpoint.states(suspended.pids).values()} - {None}
    known = suspended.hollow or any(frozen_for(pid) == suspended.image for pid in suspended.pids)
    if told != {State.RUNNING} or not known:
        node.freezer.dissolve(suspended.image)
        return
    try:
        node.freezer.freeze(suspended.image, suspended.roots)
    except PhosError as error:
        _log.warning("hollow process %d is not frozen: %s", suspended.pid, error)
        node.freezer.dissolve(suspended.image)
    node.suspended.write(msgspec.structs.replace(suspended, hollow=True, format=HOLLOW))
