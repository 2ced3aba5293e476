"""A close look at one process: what its hook tells of it, while no job works on it.

Each raises :class:`Busy` while one does, :class:`Unsupported` when there is no hook to be asked,
:class:`NoSuchProcess` when the process is gone, :class:`Timeout` when the hook takes too long, and
:class:`NotAuthorized` when somebody else has put himself in its place.
"""

import contextlib
from collections.abc import Iterator

from phosd.engine.hook_client.link import HookBlock, HookLink, Kernel
from phosd.engine.node.node import Node
from phosd.engine.program.process import placed
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchProcess, Unsupported

_PATIENCE = 2.0
"""Seconds that a hook may take for each answer."""


def blocks(node: Node, process: ProcessId) -> list[tuple[HookBlock, int]]:
    """Every block in order of id, with the node's ordinal of its GPU (-1 for host memory)."""
    with _asked(node, process) as link:
        return placed(link.hello(), link.list_blocks())


def kernels(node: Node, process: ProcessId) -> list[Kernel]:
    """The kernels launched since a checkpoint last looked at them, in order of the first launch."""
    with _asked(node, process) as link:
        return link.kernels()


def log(node: Node, process: ProcessId) -> str:
    """The hook's counters and the newest lines of its log, a line each."""
    with _asked(node, process) as link:
        return link.stats()


@contextlib.contextmanager
def _asked(node: Node, process: ProcessId) -> Iterator[HookLink]:
    """Connect to the hook of a process, to ask it something."""
    pid = process.pid
    with node.asking(pid) as free:
        if not free:
            raise Busy(
                f"a job works on process {pid}, so it cannot be asked",
                hint="ask again when the job has ended (`phos jobs`)",
            )
        link = HookLink(pid, node.config.runtime_dir, _PATIENCE)
        try:
            link.connect()
        except NoSuchProcess as error:
            _require(process)
            raise Unsupported(
                f"process {pid} has no hook that tells this: {error.what}",
                hint="start programs with `phos run`",
            ) from error
        with link:
            _require(process)  # it is the peer that was connected to, and nobody after it
            yield link


def _require(process: ProcessId) -> None:
    if procfs.process_id(process.pid) != process:
        raise NoSuchProcess(
            f"process {process.pid} has ended", hint="`phos ps` lists the GPU processes"
        )
