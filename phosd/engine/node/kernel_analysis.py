"""Analyse the kernels that processes launch, in the background, and say what is known of them.

A step looks at one process: its hook tells which kernels it has launched, and which images it has
loaded them from. Among the modules whose kernels are not all known, the bytes of the one with most
launches are fetched, once for each user; what other processes have launched of the same bytes is
known already. Modules that were compiled at run time, which are small, come next, launched or not,
and at last all others that the process has loaded, as far as there is time to spare.

Whose user has used least processor time in the last hour comes first. No process under a job is
asked anything, and nothing here waits for one.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from phosd.engine.analysis.code import tools
from phosd.engine.analysis.table import merged
from phosd.engine.hook_client.code_images import CodeImage
from phosd.engine.hook_client.link import LaunchedKernel as Kernel
from phosd.engine.kernels.analyser import Analyser
from phosd.engine.kernels.cache import Cache
from phosd.engine.kernels.entry import Entry
from phosd.engine.kernels.fetch import fetch
from phosd.engine.kernels.hourly import HourlyTime
from phosd.engine.kernels.module import Module
from phosd.engine.node import inspection
from phosd.engine.node.gpus import architecture_of
from phosd.engine.node.launched_kernels import KnownKernel, Watched, by_module
from phosd.engine.node.node import Node
from phosd.engine.program.process import GpuProcess
from phosd.engine.system.procfs import ProcessId
from phosd.errors import (
    Busy,
    Cancelled,
    Internal,
    NoSuchProcess,
    PhosError,
    Reason,
    Timeout,
    Unsupported,
)

LOOK_SECONDS = 30.0
"""Between two looks at a process of which nothing is left to analyse."""
_MOST_DIGESTS = 1 << 16
_MOST_GIVEN_BYTES = 64 << 20
"""Most bytes of the tables that one process gets; it keeps each as long as it runs."""
_MOST_UNASKED_BYTES = 4 << 20
"""Most bytes of a table of kernels that are not known to be launched."""
_COUNT_SECONDS = 3
_COUNT_AGAIN_SECONDS = 600.0
"""How long launches are counted where a process has not launched anything that is known, and when
again: each costs the program as much as while a checkpoint copies on write, some microseconds.
"""
_SPARE = 0.5
"""How much of an hour's time may go to what is not known to be launched."""
_MOST_FRUITLESS = 3
_MOST_NAMES = 256
"""Most kernels of a module that are analysed at a time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnalysisLimits:
    """What the analysis may take: processor time of one analysis of a module, and of all in an
    hour, in seconds; bytes of the cache.
    """

    module_seconds: int
    hour_seconds: int
    cache_bytes: int


class KernelAnalysis:
    """The analysis of the node's processes. :meth:`step` is for one thread, the others for any."""

    def __init__(self, node: Node, limits: AnalysisLimits | None) -> None:
        """Begin with nothing known; without limits nothing is analysed."""
        self._node = node
        self._limits = limits
        self._watched: dict[ProcessId, Watched] = {}
        self._digests: OrderedDict[tuple[int, int], str] = OrderedDict()
        """By user and hash. A hash can be forged, but whoever does harms only their own."""
        self._time = HourlyTime(limits.hour_seconds if limits else 0)
        self._missing = ""
        self._tools = ""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        cache = Cache(
            node.config.state_dir, node.store.key.packed, limits.cache_bytes if limits else 0
        )
        self._analyser = Analyser(cache, limits.module_seconds if limits else 0)

    def close(self) -> None:
        """End what is going on."""
        self._stopped.set()
        self._analyser.stop()

    # -- what is known ------------------------------------------------------------------------

    def known(self, process: ProcessId, uid: int) -> list[KnownKernel]:
        """Return the kernels that a process of this user has launched since they were last begun to
        be counted, with what is known of each. Raises as :func:`inspection.launches` does.
        """
        return self._described(process, uid, inspection.launches(self._node, process))

    def _described(
        self, process: ProcessId, uid: int, kernels: Iterable[Kernel]
    ) -> list[KnownKernel]:
        with self._lock:
            watched = self._watched.get(process) or Watched(uid)
        waits = self._waits(watched)
        entries: dict[int, Entry | None] = {}
        found = []
        for kernel in kernels:
            if kernel.module not in entries:
                entries[kernel.module] = self._entry(watched, kernel.module)
            found.append(watched.described(kernel, entries[kernel.module]) or waits(kernel))
        return found

    def hurry(self, process: ProcessId, uid: int, count_seconds: int = 0) -> int:
        """Look at a process before all others, now, and count its launches for so many
        seconds. Returns how many of the kernels that it has launched wait for nothing but to be
        analysed. Raises as :meth:`known` does, and :class:`Unsupported` if nothing is analysed
        here.
        """
        is_off = self._limits is None
        kernels = inspection.launches(self._node, process, 0 if is_off else count_seconds)
        if is_off:
            raise Unsupported(
                "kernels are not analysed on this machine",
                hint='set `analysis = "background"` in phosd.toml',
                reason=Reason.ANALYSIS_OFF,
            )
        known = self._described(process, uid, kernels)
        with self._lock:
            watched = self._watched.setdefault(process, Watched(uid))
            watched.asked_for, watched.quiet_until = True, 0.0
            watched.settled, watched.trouble = {}, ""  # an entry may have gone meanwhile
        return sum(one.state == "waiting" and not one.reason for one in known)

    def _waits(self, watched: Watched) -> Callable[[Kernel], KnownKernel]:
        """Return what to say of a process's kernels that could be analysed, and are not."""
        state, why = "waiting", watched.trouble
        if self._limits is None:
            state, why = "analysis-off", "kernels are not analysed on this machine"
        elif self._missing:
            state, why = "no-tool", self._missing
        elif self._time.is_over(watched.uid):
            why = "as much was analysed in the last hour as may be"
        return lambda kernel: KnownKernel(kernel, state, why)

    def _entry(self, watched: Watched, module: int) -> Entry | None:
        """Return what is known of a module of a process: for the architecture of which least is."""
        digest = self._digest(watched, module)
        if digest is None:
            return None
        found = [self._analyser.known(digest, each) for each in watched.architectures]
        if not all(found):
            return None
        return min(filter(None, found), key=lambda one: len(one.kernels), default=None)

    def _digest(self, watched: Watched, module: int) -> str | None:
        with self._lock:
            return self._digests.get((watched.uid, module))

    # -- in the background --------------------------------------------------------------------

    def step(self, processes: Iterable[GpuProcess]) -> bool:
        """Look at one of these processes, and analyse what it has launched of one module. Returns
        whether there may be more to do.
        """
        hooked = {one.id: one for one in processes if one.hook_state == "hooked"}
        with self._lock:
            for gone in self._watched.keys() - hooked.keys():
                del self._watched[gone]
            for process, described in hooked.items():
                self._watched.setdefault(process, Watched(described.uid))
            spent = self._time.by_user()
            users = {each.uid for each in self._watched.values()}
            may = {uid for uid in users if not self._time.is_over(uid)}
            now = time.monotonic()
            due = [
                (not each.asked_for, spent[each.uid], each.quiet_until, process)
                for process, each in self._watched.items()
                if each.quiet_until <= now and each.uid in may
            ]
        if not due or self._limits is None or self._lacks_tools():
            return False
        process = min(due)[-1]
        watched = self._watched[process]
        began = time.monotonic()
        try:
            if self._look(process, watched):
                return True
            watched.asked_for, watched.trouble = False, ""
        except Cancelled:
            return False
        except (PhosError, OSError) as error:
            self._time.spend(watched.uid, time.monotonic() - began)
            self._settle(process, watched, error)
        now = time.monotonic()
        counts = now - watched.counted < _COUNT_SECONDS
        pause = _COUNT_SECONDS if counts else LOOK_SECONDS
        watched.quiet_until = max(watched.quiet_until, now + pause)
        return len(due) > 1

    def _settle(self, process: ProcessId, watched: Watched, error: PhosError | OSError) -> None:
        """Note why nothing was done: of the machine, of the process, or of this moment."""
        if isinstance(error, Internal) and error.reason:  # a tool or a package
            self._missing, self._tools = str(error), tools.version()
            _log.info("kernels are not analysed: %s", error)
            return
        level = logging.DEBUG if isinstance(error, Busy | NoSuchProcess) else logging.INFO
        if watched.trouble != str(error):
            _log.log(level, "kernels of process %d are not analysed: %s", process.pid, error)
        watched.trouble = str(error)
        if isinstance(error, Internal):  # its hook is too old
            watched.quiet_until = float("inf")

    def _look(self, process: ProcessId, watched: Watched) -> bool:
        """Analyse what a process has launched of one module. Returns whether it did."""
        kernels, images, gpus = inspection.code(self._node, process, watched.seen)
        self._count(process, watched, kernels)
        watched.load(images)
        watched.architectures = tuple(sorted({*map(architecture_of, gpus)}))
        launched = by_module(kernels)
        for module in watched.in_order(launched):
            names = launched.get(module)
            if watched.settled.get(module) == len(names or ()):
                continue
            entry = self._entry(watched, module)
            if not watched.is_known(entry, names):
                try:
                    self._analyse(process, watched, watched.images[module], names)
                except (Unsupported, Timeout) as error:
                    watched.unread[module] = error.what
                return True
            if entry is not None:
                self._give(process, watched, module, entry, names)
            watched.settled[module] = len(names or ())
        return self._look_up(process, watched) or self._look_ahead(process, watched)

    def _count(self, process: ProcessId, watched: Watched, kernels: Sequence[Kernel]) -> None:
        """Count the launches of a process for some seconds, if nothing is known of them:
        else they are while a checkpoint copies on write only.
        """
        now = time.monotonic()
        if not kernels and now - watched.counted > _COUNT_AGAIN_SECONDS:
            inspection.launches(self._node, process, _COUNT_SECONDS)
            watched.counted = now

    def _look_up(self, process: ProcessId, watched: Watched) -> bool:
        """Look whether something is known of a module that is loaded, and not known to be launched,
        so that the hook has it before anything is counted. Returns whether one was fetched for it.
        """
        for image in watched.first_images():
            if image.hash in watched.settled:
                continue
            if new := self._digest(watched, image.hash) is None:
                try:
                    self._fetched(process, watched, image).__exit__(None, None, None)
                except (Unsupported, Timeout) as error:
                    watched.unread[image.hash] = error.what
                    return True
            if (entry := self._entry(watched, image.hash)) is not None:
                self._give(process, watched, image.hash, entry)
            watched.settled[image.hash] = 0
            if new:
                return True
        return False

    def _look_ahead(self, process: ProcessId, watched: Watched) -> bool:
        """Analyse all of a module that is loaded, the smallest first, if there is time to spare.
        Returns whether one was.
        """
        if self._time.is_over(watched.uid, _SPARE):
            return False
        for image in sorted(watched.first_images(), key=lambda image: image.size):
            if image.hash in watched.done:
                continue
            if not watched.is_known(self._entry(watched, image.hash), None):
                try:
                    self._analyse(process, watched, image, None)
                except (Unsupported, Timeout) as error:
                    watched.unread[image.hash] = error.what
                watched.settled.pop(image.hash, None)  # there is more to give
                return True
            watched.done.add(image.hash)
        return False

    def _analyse(
        self,
        process: ProcessId,
        watched: Watched,
        image: CodeImage,
        kernels: Sequence[Kernel] | None,
    ) -> None:
        with self._fetched(process, watched, image) as module:
            for architecture in watched.architectures:
                known = self._analyser.known(module.digest, architecture)
                had = known.kernels.keys() if known else ()
                names = None
                if kernels is not None:
                    left = [k for k in kernels if k.name not in had and not watched.has_not(k)]
                    names = [kernel.name for kernel in left[:_MOST_NAMES]]
                found = self._analyser.analyse(module, architecture, names)
                self._time.spend(watched.uid, found.seconds)
                if found.absent:
                    watched.absent.setdefault(image.hash, set()).update(found.absent)
                elif len(found.entry.kernels) == len(had) and not found.entry.whole:
                    watched.fruitless[image.hash] += 1
                    if watched.fruitless[image.hash] == _MOST_FRUITLESS:
                        watched.done.add(image.hash)
                        if kernels is not None:
                            watched.unread[image.hash] = found.entry.reason or "it takes too long"

    def _fetched(self, process: ProcessId, watched: Watched, image: CodeImage) -> Module:
        """Fetch an image, and remember its digest."""
        began = time.monotonic()
        try:
            module = fetch(process, image, self._stopped)
        finally:
            self._time.spend(watched.uid, time.monotonic() - began)
        with self._lock:
            self._digests[watched.uid, image.hash] = module.digest
            while len(self._digests) > _MOST_DIGESTS:
                self._digests.popitem(last=False)
        return module

    def _give(
        self,
        process: ProcessId,
        watched: Watched,
        module: int,
        entry: Entry,
        kernels: Sequence[Kernel] | None = None,
    ) -> None:
        """Give the hook a table of what is known of a module's kernels, if that is more than it
        has: of all, or if that is much, of those that were launched. A process on GPUs of several
        architectures gets none: a table is of one.
        """
        tables = {name: facts.table for name, facts in entry.kernels.items() if facts.table}
        size = sum(map(len, tables.values()))
        if chosen := size > _MOST_UNASKED_BYTES:
            tables = {k.name: tables[k.name] for k in kernels or () if k.name in tables}
            size = sum(map(len, tables.values()))
        before, had = watched.given.get(module, (chosen, 0))
        if len(watched.architectures) != 1 or (before == chosen and len(tables) <= had):
            return
        if watched.given_bytes + size > _MOST_GIVEN_BYTES:
            _log.info("process %d gets no more tables of kernels", process.pid)
            return
        try:
            table = merged(module, entry.architecture, tables.values())
            inspection.give_summaries(self._node, process, table)
        except Unsupported as error:
            _log.info("process %d gets no table of a module: %s", process.pid, error)
        else:
            watched.given_bytes += len(table)
        watched.given[module] = chosen, len(tables)  # the same is not tried again

    # -- limits -------------------------------------------------------------------------------

    def _lacks_tools(self) -> bool:
        """Return whether the tools that were missing, or other ones, are still so."""
        if self._missing and tools.version() != self._tools:
            self._missing = ""
        return bool(self._missing)
