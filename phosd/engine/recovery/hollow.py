"""Tell a hollow program, which its gates alone keep still, from one that is on its way back."""

from pathlib import Path

from phosd.engine.hook_client.link import HookState, reach
from phosd.engine.node.suspended import Suspended
from phosd.engine.program import process
from phosd.engine.recovery.guarded import kept_for
from phosd.errors import PhosError

_ANSWER_SECONDS = 5.0


def rests(suspended: Suspended, runtime_dir: Path) -> bool:
    """Return whether a suspended program whose processes the driver has brought back, or has never
    had, has nothing of its memory: all of its hooks are parked, and no mover keeps any for it. Then
    its image has it, and a resume begins anew.

    False where a hook or a mover does not answer, or no process has a hook.
    """
    parked = 0
    try:
        if kept_for(suspended.processes, runtime_dir):
            return False
        for pid in sorted(suspended.pids):
            if process.has_only_nvml(pid):
                continue
            with reach(pid, runtime_dir, _ANSWER_SECONDS) as link:
                if link.hello().state is not HookState.PARKED:
                    return False
                parked += 1
    except PhosError:
        return False
    return parked > 0
