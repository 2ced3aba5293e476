"""Compute the ranges that a launch accesses, from what was found in its kernel.

With the launch's parameters and dimensions, every atom becomes a number, an unknown with bounds, or
a sum of those (``linear``). Unknowns are thread and block indices, the iterations of loops, and
what a machine word loses. What holds at an access constrains them. Alternatives are looked at one
by one: of each choice that an address has, and of each loop its first iteration and the later ones,
of which it is known that the iteration before was not the last.

The hook does the same with tables (``phosd/hook/ranges``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from phosd.engine.analysis.alternatives import alternatives
from phosd.engine.analysis.reference.evaluation import ADDRESSES, Assumed, Evaluation, Launch
from phosd.engine.analysis.thread.followed import Access, Followed

_MOST_CASES = 32


@dataclass(frozen=True, order=True)
class Span:
    """Addresses ``[begin, end)``."""

    begin: int
    end: int


def merged(spans: list[Span]) -> list[Span]:
    """Return the same addresses in order, each once."""
    found: list[Span] = []
    for one in sorted(spans):
        if found and one.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def spans(followed: Followed, access: Access, launch: Launch) -> list[Span] | None:
    """Return where the access is, at most; nowhere if it never happens. None: not known."""
    try:
        return _spans(followed, access, launch)
    except RecursionError:  # a chain of very many loops
        return None


def _spans(followed: Followed, access: Access, launch: Launch) -> list[Span] | None:
    found = []
    if access.through_map:
        return None
    for case in cases(followed, access, launch):
        ends = case.bounds(access.address)
        if ends is None:  # this case cannot be
            continue
        low, high = ends
        if low is None or high is None:
            return None
        shift = low // ADDRESSES * ADDRESSES
        if high - shift + access.size > ADDRESSES:
            return None
        found.append(Span(low - shift, high - shift + access.size))
    return merged(found)


def cases(followed: Followed, access: Access, launch: Launch) -> Iterator[Evaluation]:
    """Yield the alternatives, one that has all of them if there are too many."""
    choices, loops = alternatives(followed, access.address)
    every: list[Assumed] = [Assumed({}, {})]
    decided = Evaluation(followed, access.facts, launch)
    for key, count in choices.items():
        places = decided.places(key, count)
        every = [
            Assumed({**one.chosen, key: place}, one.first) for one in every for place in places
        ]
        if len(every) > _MOST_CASES:
            every = [Assumed({}, {})]
            break
    for header in loops:
        if len(every) * 2 > _MOST_CASES:
            break
        every = [
            Assumed(one.chosen, {**one.first, header: first})
            for one in every
            for first in (True, False)
        ]
    for assumed in every:
        yield Evaluation(followed, access.facts, launch, assumed)
