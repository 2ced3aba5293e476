"""Query the hook of one process, while no job works on the process.

Each function raises :class:`Busy` if a job does or the process is suspended, :class:`Unsupported`
if there is no hook to query, :class:`NoSuchProcess` if the process has ended, :class:`Timeout` if
the hook takes too long, and :class:`NotAuthorized` if another user's process listens in its place.
"""

import contextlib
import os
from collections.abc import Iterator

from phosd.engine.hook_client.code_images import CodeImage
from phosd.engine.hook_client.link import (
    HookBlock,
    HookLink,
    Kernel,
    LaunchedKernel,
    ProgramOutcome,
)
from phosd.engine.node.node import Node
from phosd.engine.program.process import placed
from phosd.engine.program.process_gpus import gpus_of
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchProcess, Reason, Unsupported

_TIMEOUT = 2.0
"""Seconds that a hook has for each answer."""


def blocks(node: Node, process: ProcessId) -> list[tuple[HookBlock, int]]:
    """Return all blocks, by id, with the node's ordinals of their GPUs (-1: host memory)."""
    with _asked(node, process) as link:
        return placed(link.hello(), link.list_blocks())


def kernels(node: Node, process: ProcessId) -> list[Kernel]:
    """Return the kernels launched since the last checkpoint that read them, by first launch."""
    with _asked(node, process) as link:
        return link.kernels()


def launches(node: Node, process: ProcessId, count_seconds: int = 0) -> list[LaunchedKernel]:
    """Return the kernels that were launched since they are counted, with what their tables say of
    it, and count launches for so many seconds from now on. Raises :class:`Internal`, too, if the
    hook is too old to tell it.
    """
    with _asked(node, process) as link:
        return link.launches(count_seconds)


def code(
    node: Node, process: ProcessId, after: int = 0
) -> tuple[list[LaunchedKernel], list[CodeImage], list[int]]:
    """Return these kernels, the images that the process has loaded kernels from, without the first
    ones, and the node's ordinals of its GPUs. Raises as :func:`launches` does.
    """
    with _asked(node, process) as link:
        gpus = gpus_of(link.hello())
        return link.launches(), link.images(after), gpus


def give_summaries(node: Node, process: ProcessId, table: bytes) -> None:
    """Give the hook a table of what a module's kernels access. Raises :class:`Unsupported`, too, if
    it does not take it.
    """
    file = os.memfd_create("kernels")
    try:
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(table)
        with _asked(node, process) as link:
            link.give_summaries(file)
    finally:
        os.close(file)


def log(node: Node, process: ProcessId) -> str:
    """Return the hook's counters and the newest lines of its log, one per line."""
    with _asked(node, process) as link:
        return link.stats()


def answer_wish(node: Node, process: ProcessId, wish: int, error: str) -> None:
    """Tell the threads of a process what has come of the checkpoint that they asked for: the image
    is complete, or ``error``.
    """
    outcome = ProgramOutcome.FAILED if error else ProgramOutcome.SAVED
    with _asked(node, process) as link:
        link.answer_program(outcome, wish=wish, text=error)


@contextlib.contextmanager
def _asked(node: Node, process: ProcessId) -> Iterator[HookLink]:
    """Connect to the hook of a process for a query."""
    pid = process.pid
    with node.asking(pid) as free:
        if not free:
            raise Busy(
                f"a job works on process {pid}, so it cannot be asked",
                hint="ask again when the job has ended (`phos jobs`)",
            )
        node.suspended.require_awake({pid})  # its hook would not answer
        link = HookLink(pid, node.config.runtime_dir, _TIMEOUT)
        try:
            link.connect()
        except NoSuchProcess as error:
            _require(process)
            raise Unsupported(
                f"process {pid} has no hook that tells this: {error.what}",
                hint="start programs with `phos run`",
                reason=Reason.NO_HOOK,
            ) from error
        with link:
            _require(process)  # the connected peer is this process, not a later one with its pid
            yield link


def _require(process: ProcessId) -> None:
    if procfs.process_id(process.pid) != process:
        raise NoSuchProcess(
            f"process {process.pid} has ended", hint="`phos ps` lists the GPU processes"
        )
