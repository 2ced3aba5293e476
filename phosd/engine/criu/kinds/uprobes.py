"""Mapped files that uprobes trace (perf, bpftrace, monitors).

CRIU saves the breakpoints with the memory. Restored where the probes are gone, the program would
stand still at the first one, and nobody would be told. The kernel's mapping alone, which stays when
the tracer has ended, is left out: the kernel makes it anew for the next probe.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from phosd.engine.criu.kinds.kind import Choices, FileKind, Restoring
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.system import uprobes
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS, describe

_SHOWN = 3
_REMEDY = "end the tracer (perf, bpftrace, a monitor) and try again"


class Uprobes(FileKind):
    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        optimized = {each.pid for each in tree.own_mappings if each.path == uprobes.OPTIMIZED}
        for pid in sorted(optimized):
            yield (
                f"{describe(pid)} has been traced by uprobes of a kind that cannot be saved even "
                "when the tracer has ended (start the program anew)"
            )
        traced = {each.pid for each in tree.own_mappings if each.path == uprobes.AREA} - optimized
        for pid in sorted(traced):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found = dict(ABANDONABLE_THREADS.each([pid], uprobes.traces))
                if pid not in found:
                    yield f"{describe(pid)} has been traced by uprobes, and cannot be looked at"
                elif places := found[pid]:
                    yield f"{describe(pid)} is traced by uprobes at {_listed(places)} ({_REMEDY})"

    def dump_parts(self, folder: Path, choices: Choices) -> Iterator[CriuPart]:
        yield _AllowUprobes()

    def restore_parts(self, restoring: Restoring) -> Iterator[CriuPart]:
        yield _AllowUprobes()


class _AllowUprobes(CriuPart):
    """Has CRIU leave the kernel's mapping out. What would be left in other memory is refused."""

    @property
    def words(self) -> Sequence[str]:
        return ["--allow-uprobes"]


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return ", ".join(places[:_SHOWN]) + more
