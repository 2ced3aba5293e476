"""Analyse the kernels that a program launches, as phosd does in the background, but at once.

What is found is kept in the state folder, by the bytes of the modules: another program, or the same
one later, has it without being analysed again. Several programs may be analysed at a time.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from phosd.engine.hook_client.link import LaunchedKernel
from phosd.engine.kernels.analyser import Analyser, Found
from phosd.engine.kernels.cache import Cache
from phosd.engine.kernels.fetch import fetch
from phosd.engine.node import inspection
from phosd.engine.node.gpus import architecture_of
from phosd.engine.node.kernel_analysis import AnalysisLimits, KernelAnalysis
from phosd.engine.node.launched_kernels import KnownKernel, by_module
from phosd.engine.node.node import Node
from phosd.engine.program.process import GpuProcess, describe
from phosd.engine.program.tree import scan
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Cancelled, Timeout, Unsupported

COUNT_SECONDS = 5
"""How long it is counted what a program launches."""
_CACHE_BYTES = 8 << 30
_HOUR_SECONDS = 1 << 30
_BATCH = 2
"""Kernels that one process analyses: each has to find them in the module first."""
_MODULE_SECONDS = 30
"""Longest analysis of one module: by so much the filling of the cache may pass its deadline."""


@dataclass
class Analysed:
    """What has come of the kernels that a program has launched: how many of them were analysed, of
    how many of these something is ``unknown``, how many have ``no_code`` that can be analysed, how
    many were left ``waiting`` at the deadline; bytes of the tables of those that were analysed.
    """

    seconds: float = 0.0
    kernels: int = 0
    unknown: int = 0
    no_code: int = 0
    waiting: int = 0
    table_bytes: int = 0

    def add(self, one: KnownKernel) -> None:
        """Count a kernel."""
        if one.facts is not None:
            self.kernels += 1
            self.unknown += bool(one.facts.unknown_reads or one.facts.unknown_writes)
            self.table_bytes += len(one.facts.table)
        elif one.state == "waiting":
            self.waiting += 1
        else:
            self.no_code += 1

    def row(self) -> dict[str, Any]:
        """Return the fields for a result."""
        return asdict(self)


def analyse(node: Node, pid: int, seconds: float) -> Analysed:
    """Analyse what the processes of a tree launch within :data:`COUNT_SECONDS`, until nothing waits
    any more or the deadline has come, and give their hooks the tables.
    """
    began = time.monotonic()
    end = began + seconds
    limits = AnalysisLimits(_MODULE_SECONDS, _HOUR_SECONDS, _CACHE_BYTES)
    analysis = KernelAnalysis(node, limits)
    found = Analysed()
    try:
        processes = hooked(node, pid)
        for one in processes:
            analysis.hurry(one.id, one.uid, COUNT_SECONDS)
        time.sleep(COUNT_SECONDS)
        for one in processes:
            fill_cache(node, one.id, end)
            # One look at the process gives the hook the tables that are in the cache.
            while analysis.hurry(one.id, one.uid) and time.monotonic() < end:
                analysis.step([one])
            analysis.step([one])
            for kernel in analysis.known(one.id, one.uid):
                found.add(kernel)
    finally:
        analysis.close()
    found.seconds = time.monotonic() - began
    return found


def hooked(node: Node, pid: int) -> list[GpuProcess]:
    """Return the processes of a tree that have the hook."""
    found = (describe(each, node.config.runtime_dir) for each in scan(pid).pids)
    return [one for one in found if one is not None and one.hook_state == "hooked"]


def fill_cache(node: Node, process: ProcessId, end: float) -> None:
    """Analyse what a process has launched, with as many processes as there are processors, until
    ``end`` on the monotonic clock.
    """
    kernels, images, gpus = inspection.code(node, process)
    by_hash = {image.hash: image for image in images}
    left = end - time.monotonic()
    if left <= 0:
        return
    analyser = Analyser(
        Cache(node.config.state_dir, node.store.key.packed, _CACHE_BYTES), max(1, int(left))
    )
    timer = threading.Timer(left, analyser.stop)
    timer.start()
    begun: list[Future[Found]] = []
    ended = threading.Event()
    try:
        with ExitStack() as files, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for module_hash, launched in by_module(kernels).items():
                if module_hash not in by_hash:
                    continue
                try:
                    module = files.enter_context(fetch(process, by_hash[module_hash], ended))
                except (Unsupported, Timeout):
                    continue  # as the kernels' state says then
                for architecture in {*map(architecture_of, gpus)}:
                    for names in _batches(launched):
                        begun.append(pool.submit(analyser.analyse, module, architecture, names))
    finally:
        timer.cancel()
    for each in begun:
        with suppress(Cancelled):  # the deadline came first
            each.result()


def _batches(kernels: list[LaunchedKernel]) -> Iterator[list[str]]:
    names = [kernel.name for kernel in kernels]
    for at in range(0, len(names), _BATCH):
        yield names[at : at + _BATCH]
