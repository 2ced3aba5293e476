"""Say which kernels leave the same memory if a launch of theirs is run again.

An instance, a kernel with its parameters and dimensions, is *idempotent* if nothing that it reads
before it has written it itself is overwritten by it: it then reads the same when it is run again,
after it has ended or half-way. A load counts as one of what was there before unless its thread has
itself written these bytes on every way to it (:attr:`Access.after_write`); that another thread has,
counts for nothing.

That is a statement about device memory, and no other: clocks, the number of a multiprocessor, votes
of a warp, and shared, local and registers' memory that was never written may be different each
time. Constant banks and parameters are never written by a kernel. Textures and surfaces, launches
by kernels and allocations on the device are unknown instructions or calls, and their kernels
unknown. What is printed would be printed twice: such an instance is not idempotent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.summary import Summary
from phosd.engine.analysis.thread.followed import Access, Followed
from phosd.engine.analysis.values.conditions import Compare
from phosd.engine.analysis.values.terms import Kind, Term, smallest, terms_in

PRINTS = "prints"
ATOMIC = "atomic operation"
_IN_PLACE = "in place"


class Idempotent(Enum):
    """Which launches of a kernel are idempotent. NEVER: none in which a thread reaches a read of
    memory that it overwrites.
    """

    ALWAYS = "always"
    DEPENDS = "depends"
    NEVER = "never"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Class:
    """The verdict on a kernel, and why it is no better."""

    idempotent: Idempotent
    why: frozenset[str] = frozenset()


def reads(followed: Followed) -> list[Access]:
    """Return the accesses that may read what was there before the launch."""
    return [
        access
        for access in followed.accesses
        if access.use is not Use.WRITTEN and not access.after_write
    ]


def writes(followed: Followed) -> list[Access]:
    """Return the accesses that write."""
    return [access for access in followed.accesses if access.use is not Use.READ]


def of_kernel(summary: Summary) -> Class:
    """Return what holds for all launches of a kernel."""
    followed = summary.followed
    if followed is None:
        return Class(Idempotent.UNKNOWN, frozenset((summary.reason,)))
    if followed.prints:
        return Class(Idempotent.NEVER, frozenset((PRINTS,)))
    loads, stores = reads(followed), writes(followed)
    if not loads or not stores:
        return Class(Idempotent.ALWAYS)
    if never := frozenset(_overwritten(loads, stores)):
        return Class(Idempotent.NEVER, never)
    counted = {*map(id, loads), *map(id, stores)}
    unknown = frozenset[str]()
    for access, came in summary.accesses:
        if id(access) in counted and not came.decided:
            unknown |= came.unknown
    return Class(Idempotent.UNKNOWN if unknown else Idempotent.DEPENDS, unknown)


def _overwritten(loads: Sequence[Access], stores: Sequence[Access]) -> Iterator[str]:
    """Yield how threads overwrite what they read."""
    by_term: dict[Term, list[tuple[int, int]]] = {}
    for access in stores:
        if not _depends(access) and not access.through_map:
            base, offset = access.address.without_constant()
            by_term.setdefault(base, []).append((offset, access.size))
    for access in loads:
        if _depends(access):
            continue
        if access.use is Use.BOTH:
            yield ATOMIC
            continue
        if access.through_map:
            continue
        base, offset = access.address.without_constant()
        for other, size in by_term.get(base, ()):
            if -access.size < smallest(offset - other, 1 << 64) < size:
                yield _IN_PLACE


def _depends(access: Access) -> bool:
    """Return whether the launch, or a block's index, decides if anybody gets to an access."""
    return any(
        isinstance(fact, Compare) and _of_block(fact.one) and _of_block(fact.other)
        for fact in access.facts
    )


def _of_block(term: Term) -> bool:
    for monomial in term.parts:
        for atom in monomial:
            match atom.kind:
                case Kind.UNKNOWN | Kind.LOOP | Kind.CHOICE:
                    return False
                case Kind.THREAD if not atom.args[0].startswith("ctaid"):
                    return False
            if not all(map(_of_block, terms_in(atom.args))):
                return False
    return True
