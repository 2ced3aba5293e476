"""The hook's evaluation of tables (``phosd/hook/ranges``), called from here."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from phosd.engine.analysis.alternatives import alternatives
from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.reference.evaluation import Evaluation, Launch
from phosd.engine.analysis.reference.launch_verdict import Verdict, of_launch
from phosd.engine.analysis.reference.ranges import Span, merged, spans
from phosd.engine.analysis.summary import Summary
from phosd.engine.analysis.thread.followed import Access, Followed
from phosd.engine.analysis.values.conditions import Compare
from tests.native.analysis.oracle import Seen, is_dropped, sunk

NATIVE = Path(__file__).parents[3] / "phosd" / "native"
MOST = 64


class _Found(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("use", ctypes.c_uint32),
        ("is_origin", ctypes.c_uint32),
    )


@dataclass
class Accesses:
    """What the hook says of a launch: ranges, addresses into blocks, by use (``read``,
    ``written``), and the uses of which it does not know all; and whether it may be run again.
    """

    ranges: dict[str, list[tuple[int, int]]]
    origins: dict[str, list[int]]
    unknown: set[str]
    verdict: str


_USES = {"read": 1, "written": 2}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(NATIVE / "tests" / "libphos_hook_ranges.so"))
    library.take_table.restype = ctypes.c_char_p
    return library


def take(table: bytes) -> str:
    """Give a table to the hook's code. Returns why it is refused, or nothing."""
    descriptor = os.memfd_create("table", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, table)
        return str(_library().take_table(descriptor).decode())
    finally:
        os.close(descriptor)


def accesses(
    module: int,
    name: str,
    launch: Launch,
    allocated: Sequence[tuple[int, int]] = (),
    *,
    remembered: bool = False,
) -> Accesses | None:
    """Return what the hook says of a launch; None: it does not know the kernel. ``allocated``:
    ``[begin, end)`` of what the process has.
    """
    flat = [end for extent in allocated for end in extent]
    extents = (ctypes.c_uint64 * len(flat))(*flat)
    _library().allocate(extents, ctypes.c_size_t(len(allocated)))
    found = (_Found * MOST)()
    unknown, verdict = ctypes.c_uint32(), ctypes.c_uint32()
    sizes = (ctypes.c_uint32 * 6)(*launch.block, *launch.grid)
    parameters = launch.parameters
    count = _library().ranges_of(
        *(ctypes.c_uint64(module), name.encode(), parameters, ctypes.c_size_t(len(parameters))),
        *(sizes, int(remembered), found, MOST, ctypes.byref(unknown)),
        ctypes.byref(verdict),
    )
    if count < 0:
        return None
    rows = found[:count]
    return Accesses(
        {
            use: [(one.begin, one.end) for one in rows if one.use & bit and not one.is_origin]
            for use, bit in _USES.items()
        },
        {
            use: [one.begin for one in rows if one.use & bit and one.is_origin]
            for use, bit in _USES.items()
        },
        {use for use, bit in _USES.items() if unknown.value & bit},
        ("idempotent", "not", "unknown")[verdict.value],
    )


def errors(module: int, summary: Summary, seen: Seen) -> list[str]:
    """Return what the hook, which has a table of the module, says too little of a launch: what the
    software GPU saw, or the analysis found, and the hook does not.
    """
    name = seen.kernel.name
    found = accesses(module, name, seen.launch, seen.extents())
    if found is None:
        return [f"{name} is not in the table"]
    wrong = []
    if accesses(module, name, seen.launch, seen.extents(), remembered=True) != found:
        wrong.append(f"{name} is remembered otherwise")
    if found.verdict == "idempotent" and not seen.same:
        wrong.append(f"{name} is not idempotent, as the hook says")
    verdict = of_launch(summary, seen.launch, seen.allocated).verdict
    # A range that may be larger than the block of its pointer meets others that the block does not.
    as_blocks = any(found.origins.values())
    if found.verdict == "idempotent" and verdict is not Verdict.IDEMPOTENT and not as_blocks:
        wrong.append(f"{name} is idempotent, says the hook, and the analysis does not")
    for use, real in (("read", seen.read), ("written", seen.written)):
        if use in found.unknown:
            continue
        blocks = [block for at in found.origins[use] if (block := seen.allocated(at))]
        told = merged([Span(*one) for one in (*found.ranges[use], *blocks)])
        wanted = [Span(*one) for one in real]
        if not found.origins[use]:  # a block is not a range that may be larger than any
            wanted += _of_analysis(summary, Use(use), seen.launch, loops=False)
        if use == "read":  # ptxas loads nothing that the thread has just stored, and some later
            moved = [] if summary.followed is None else sunk(summary.followed, seen)
            told = merged([*told, *(Span(*one) for one in (*seen.written, *moved))])
            if (followed := summary.followed) is not None:
                wanted = [one for one in wanted if not is_dropped(followed, one.begin, one.end)]
        missed = [one for one in wanted if not _has(told, one)]
        if missed:
            wrong.append(f"{name} {use} {missed}, which the hook does not tell: {told}")
    return wrong


def is_idempotent(module: int, seen: Seen) -> bool:
    """Return whether the launch may be run again, as the hook says."""
    found = accesses(module, seen.kernel.name, seen.launch, seen.extents())
    return found is not None and found.verdict == "idempotent"


def exact(module: int, summary: Summary, launch: Launch) -> bool:
    """Return whether the hook tells the same ranges as the analysis, which tells all."""
    found = accesses(module, summary.kernel.name, launch)
    return (
        found is not None
        and not found.unknown
        and all(
            merged([Span(*one) for one in found.ranges[use.value]])
            == merged(_of_analysis(summary, use, launch, loops=True))
            and not found.origins[use.value]
            for use in (Use.READ, Use.WRITTEN)
        )
    )


def _of_analysis(summary: Summary, use: Use, launch: Launch, *, loops: bool) -> list[Span]:
    """Return the ranges that the analysis knows, but for those of accesses that cannot be: it sees
    that only if the address has to do with why. Without those in ``loops``: the hook may know that
    there is no second iteration, where the analysis does not.
    """
    found = []
    for access, _ in summary.accesses:
        followed = summary.followed
        if followed is None or access.use not in (use, Use.BOTH):
            continue
        _, carried = alternatives(followed, access.address)
        if (loops or not carried) and not _cannot_be(followed, access, launch):
            found += spans(followed, access, launch) or []
    return found


def _cannot_be(followed: Followed, access: Access, launch: Launch) -> bool:
    """Return whether what holds of an access contradicts itself."""
    evaluation = Evaluation(followed, access.facts, launch)
    facts = [fact for fact in access.facts if isinstance(fact, Compare)]
    sides = [side for fact in facts for side in (fact.one, fact.other)]
    return any(evaluation.bounds(side) is None for side in sides)


def _has(told: list[Span], one: Span) -> bool:
    return any(other.begin <= one.begin and one.end <= other.end for other in told)
