"""Tell phosd's own processes from programs: phosd would wait for itself, frozen."""

import os

from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import procfs
from phosd.errors import Reason, Unsupported


def is_mover(pid: int, *, ended: bool = False) -> bool:
    """Return whether the process is a mover, of this phosd or another: left alone, it runs no
    kernel. ``ended`` is what is said of one that is gone.
    """
    try:
        ours = (procfs.PROC / str(pid)).stat().st_uid == os.geteuid()
        return ours and "phosd.engine.mover" in procfs.command_line(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ended


def require_none(tree: ProcessTree) -> None:
    """Raise :class:`Unsupported` if phosd itself is in a tree, or one of its movers."""
    for process in tree.living:
        itself = process.pid == os.getpid()
        if itself or is_mover(process.pid):
            what = "is phosd itself" if itself else "is a mover of phosd's"
            below = "" if process.pid == tree.root.pid else f", below process {tree.root.pid}"
            raise Unsupported(
                f"process {process.pid}{below}, {what}, which stands still for nobody",
                hint="name a program: `phos ps` lists those that use a GPU",
                reason=Reason.PROCESS_STATE,
            )
