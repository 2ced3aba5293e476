"""What a thread has itself written by the time it gets somewhere, on every way there.

A load of such bytes does not tell what was there before the launch, whatever other threads write
there meanwhile. Addresses are compared as terms, which have the same value until a block runs again
that gives them another (``Term.born``). No such block is between a store and where it is still
noted: at a loop's header, that is what was written before the loop, of which the loop changes
nothing; and what was written in an iteration is forgotten when the next begins.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phosd.engine.analysis.values.conditions import Condition, Facts
from phosd.engine.analysis.values.terms import Kind, Term, smallest, terms_in
from phosd.engine.analysis.values.words import ELSEWHERE

_MOST_STORES = 64
"""Stores may be left out: without them a load counts that need not."""
_ADDRESSES = 1 << 64


@dataclass(frozen=True)
class _Store:
    """``size`` bytes at ``base`` plus ``offset``, written if ``given`` holds."""

    base: Term
    offset: int
    size: int
    given: Condition


@dataclass(frozen=True)
class Stores:
    """What was written; each store is there once."""

    every: tuple[_Store, ...] = ()

    @classmethod
    def met(cls, ways: Sequence["Stores"]) -> "Stores":
        """Return what was written on all of these ways."""
        if not ways:
            return cls()
        first, *rest = ways
        return cls(tuple(one for one in first.every if all(one in way.every for way in rest)))

    def with_one(self, address: Term, size: int, given: Condition) -> "Stores":
        """Return these and another."""
        if _is_elsewhere([address]):
            return self
        base, offset = address.without_constant()
        one = _Store(base, offset, size, given)
        others = (other for other in self.every if other != one)
        return Stores((*others, one)[-_MOST_STORES:])

    def cover(self, address: Term, size: int, facts: Facts) -> bool:
        """Return whether all of these bytes were written, by those for whom the facts hold."""
        base, offset = address.without_constant()
        spans = sorted(
            (begin, begin + one.size)
            for one in self.every
            if (one.given is True or one.given in facts) and one.base == base
            for begin in [smallest(one.offset - offset, _ADDRESSES)]
        )
        reached = 0
        for begin, end in spans:
            if begin > reached:
                break
            reached = max(reached, end)
        return reached >= size


def _is_elsewhere(terms: Iterable[Term]) -> bool:
    """Return whether other threads' values are in a term: the next may be that of another."""
    seen: set[object] = set()
    ahead = list(terms)
    while ahead:
        for monomial in ahead.pop().parts:
            for atom in monomial:
                if atom in seen:
                    continue
                seen.add(atom)
                if atom.kind is Kind.CHOICE and atom.args[0][0] == ELSEWHERE:
                    return True
                ahead += terms_in(atom.args)
    return False
