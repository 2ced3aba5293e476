"""Say whether a launch leaves the same memory if it is run again: what ``idempotency`` means by
that.

The hook decides the same from tables (``phosd/hook/ranges/launch_ranges.cpp``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.idempotency import ATOMIC, PRINTS, reads, writes
from phosd.engine.analysis.provenance import POINTER_BYTES, origin
from phosd.engine.analysis.reference.apart import Form, apart, forms
from phosd.engine.analysis.reference.evaluation import Evaluation, Launch
from phosd.engine.analysis.reference.ranges import Span, merged, spans
from phosd.engine.analysis.summary import Summary
from phosd.engine.analysis.thread.followed import Access, Followed
from phosd.engine.analysis.values.terms import smallest

Extent: TypeAlias = Callable[[int], tuple[int, int] | None]
"""The memory ``[begin, end)`` that was allocated around an address; None: there is none."""

_LEAST_ADDRESS = 1 << 16
"""No memory is mapped below it (``vm.mmap_min_addr``): such a parameter is no pointer."""
_MOST_PAIRS = 256
_MOST_FORMS = 64
_MEET = "ranges meet"
_INDEXED = "pointer chosen by an index"
_NO_RANGE = "range not known"


class Verdict(Enum):
    """What is known of an instance. NOT: what it reads meets what it overwrites, in the ranges
    that are known.
    """

    IDEMPOTENT = "idempotent"
    NOT = "not"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Instance:
    """The verdict on a launch, and why it is no better."""

    verdict: Verdict
    why: frozenset[str] = frozenset()


def of_launch(summary: Summary, launch: Launch, extent: Extent | None = None) -> Instance:
    """Return the verdict on a launch. Where a range is not known, but the pointers that an address
    may come from are, it is taken for their whole allocations, if ``extent`` tells these.
    """
    followed = summary.followed
    if followed is None:
        return Instance(Verdict.UNKNOWN, frozenset((summary.reason,)))
    if followed.prints:
        return Instance(Verdict.NOT, frozenset((PRINTS,)))
    loads, stores = reads(followed), writes(followed)
    if not loads or not stores:
        return Instance(Verdict.IDEMPOTENT)
    places = _Places(followed, launch, extent)
    written = [place for place in map(places.of, stores) if place.somewhere]
    read = [place for place in map(places.of, loads) if place.somewhere]
    if not written or not read:
        return Instance(Verdict.IDEMPOTENT)
    found = frozenset(_meetings(read, written))
    if found - {_NO_RANGE}:
        return Instance(Verdict.NOT, found - {_NO_RANGE})
    unknown = found.union(*(place.why for place in (*read, *written)))
    return Instance(Verdict.UNKNOWN, unknown) if unknown else Instance(Verdict.IDEMPOTENT)


@dataclass(frozen=True)
class _Place:
    """Where an access is: ``spans``, or not known, for ``why``; ``exact`` if they are its range,
    not allocations.
    """

    access: Access
    spans: Sequence[Span]
    why: frozenset[str]
    exact: bool
    forms: Callable[[], list[Form] | None]

    @property
    def somewhere(self) -> bool:
        return bool(self.spans or self.why)


class _Places:
    """Where the accesses of one launch are."""

    def __init__(self, followed: Followed, launch: Launch, extent: Extent | None) -> None:
        self._followed = followed
        self._launch = launch
        self._extent = extent
        self._forms: dict[int, list[Form] | None] = {}

    def of(self, access: Access) -> _Place:
        found = spans(self._followed, access, self._launch)
        if found is not None:
            return _Place(access, found, frozenset(), True, lambda: self._of(access))
        places = Evaluation(self._followed, access.facts, self._launch).places
        came = origin(self._followed, access, places)
        why = came.unknown | ({_INDEXED} if came.anywhere else set())
        whole: list[Span] = []
        if not why:
            around = self._allocations(came.parameters)
            why, whole = (frozenset((_NO_RANGE,)), []) if around is None else (why, around)
        return _Place(access, whole, why, False, lambda: None)

    def _allocations(self, parameters: frozenset[int]) -> list[Span] | None:
        """Return what is allocated around the pointers among parameters; None: it is not known of
        all that may be pointers, or none is one.
        """
        if self._extent is None:
            return None
        found = []
        for offset in parameters:
            value = self._launch.parameter(offset, POINTER_BYTES)
            if around := self._extent(value):
                found.append(Span(*around))
            elif abs(smallest(value, 1 << 64)) >= _LEAST_ADDRESS:
                return None
        return merged(found) or None

    def _of(self, access: Access) -> list[Form] | None:
        if id(access) not in self._forms:
            self._forms[id(access)] = forms(self._followed, access, self._launch)
        return self._forms[id(access)]


def _meetings(read: Sequence[_Place], written: Sequence[_Place]) -> Iterator[str]:
    """Yield in which ways what is read meets what is written."""
    pairs = 0
    everything = merged([span for place in written for span in place.spans])
    for load in read:
        if not _meet(load.spans, everything):
            continue
        for store in written:
            if not _meet(load.spans, store.spans):
                continue
            if not (load.exact and store.exact):
                yield _NO_RANGE
                continue
            pairs += 1
            if pairs <= _MOST_PAIRS and _apart(load, store):
                continue
            yield ATOMIC if load.access.use is Use.BOTH else _MEET


def _meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(one.begin < two.end and two.begin < one.end for one in some for two in others)


def _apart(load: _Place, store: _Place) -> bool:
    """Return whether no thread reads what another, or it itself, writes, although ranges meet."""
    some, others = load.forms(), store.forms()
    if some is None or others is None or len(some) * len(others) > _MOST_FORMS:
        return False
    return all(apart(one, other) for one in some for other in others)
