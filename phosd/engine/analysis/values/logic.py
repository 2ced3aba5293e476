"""Bitwise functions as arithmetic.

A function of bits has one polynomial with integers as coefficients, in which the product of bits is
the bits that they have in common: ``a | b`` is ``a + b - (a & b)``. In words that is the same for
each bit; so all that is left is to say which bits words have in common.
"""

from collections.abc import Sequence
from itertools import combinations

from phosd.engine.analysis.values.atoms import Atoms
from phosd.engine.analysis.values.conditions import Compare
from phosd.engine.analysis.values.terms import (
    ZERO,
    Kind,
    Term,
    difference,
    number,
    range_of,
    scaled,
    total,
)

_WIDE = 1 << 32
_MOST_RUNS = 3


def function(atoms: Atoms, bits: int, words: Sequence[Term]) -> Term:
    """Return a bitwise function of three words; bit 4a + 2b + c of ``bits`` is its value for bits
    a, b and c.
    """
    places = (4, 2, 1)
    result = number(-(bits & 1))  # of no bits: all ones, or none
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            factor = sum(
                (-1) ** (size - inner) * (bits >> sum(places[place] for place in subset) & 1)
                for inner in range(size + 1)
                for subset in combinations(chosen, inner)
            )
            if factor:
                result = total(result, scaled(_common(atoms, [words[at] for at in chosen]), factor))
    return result


def _common(atoms: Atoms, words: Sequence[Term]) -> Term:
    first, *rest = words
    for word in rest:
        first = common(atoms, first, word)
    return first


def common(atoms: Atoms, one: Term, other: Term) -> Term:
    """Return the bits that both words have."""
    one, other = atoms.low(one), atoms.low(other)
    if one == other:
        return one
    for term, mask in ((one, other.constant), (other, one.constant)):
        if mask is not None and (runs := _runs(mask % _WIDE)) is not None:
            parts = [_between(atoms, term, begin, end) for begin, end in runs]
            return total(ZERO, *parts)
    if _apart(one, other) or _apart(other, one):
        return ZERO
    for sign, word in ((one, other), (other, one)):
        if range_of(sign) == (-1, 0):  # all bits, or none
            below = Compare("LT", True, 32, sign, ZERO)
            return atoms.choice(("if", below), (word, ZERO), sign.born)
    for both, word in ((one, other), (other, one)):
        if (shared := _shared_in_exclusive_or(atoms, both, word)) is not None:
            return difference(word, shared)
    return atoms.common(one, other)


def _runs(mask: int) -> list[tuple[int, int]] | None:
    """Return where ones begin and end, as powers of two; None: too often."""
    found = []
    while mask:
        begin = mask & -mask
        end = begin
        while mask & end:
            mask ^= end
            end <<= 1
        found.append((begin, end))
    return found if len(found) <= _MOST_RUNS else None


def _between(atoms: Atoms, term: Term, begin: int, end: int) -> Term:
    upper = atoms.remainder(term, end) if end < _WIDE else term
    return difference(upper, atoms.remainder(term, begin))


def _shared_in_exclusive_or(atoms: Atoms, term: Term, word: Term) -> Term | None:
    """Return the bits that a word has in common with another, if the term is the exclusive or of
    the two: compilers swap registers by three of these.
    """
    for monomial, factor in term.parts.items():
        if factor == -2 and len(monomial) == 1 and monomial[0].kind is Kind.COMMON:
            one, other = monomial[0].args[0]
            shared = Term({monomial: 1})
            if word in (one, other) and term == atoms.low(total(one, other, scaled(shared, -2))):
                return shared
    return None


def _apart(term: Term, small: Term) -> bool:
    """Return whether a term is a multiple of a power of two that another is below."""
    within = range_of(small)
    if within is None or within[0] < 0:
        return False
    power = 1 << within[1].bit_length()
    return all(factor % power == 0 for factor in term.parts.values())
