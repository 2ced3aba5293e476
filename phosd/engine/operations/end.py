"""End a suspended program."""

from phosd.engine.criu.run import owned_processes
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.coming_back import require_resumable
from phosd.engine.operations.pinned_shelf import forget_removed
from phosd.engine.program.tree import scan
from phosd.engine.system import procfs


def end_suspended(node: Node, pid: int, caller: int, progress: Progress) -> None:
    """Kill the tree of a suspended program, and give back what it has in memory or on the disk.

    Raises :class:`NoSuchProcess` if it is not suspended, :class:`NotAuthorized` unless ``caller``
    may resume it.
    """
    progress.phase("end")
    suspended = node.suspended.of(pid)
    with node.claim(suspended.pids):
        require_resumable(suspended, caller)
        node.readied.drop(suspended)
        ids = {process.pid: process.id for process in scan(suspended.pid).living}
        owned_processes.end(ids, lambda each: procfs.process_id(each) == ids[each])
    node.suspend_store.forget_the_dead()
    forget_removed(node, suspended)
    progress.finish()
