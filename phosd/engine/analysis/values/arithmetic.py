"""What integer instructions compute: terms for registers, conditions for predicates.

Each function takes what the operands hold, and returns what the results do. NVIDIA documents the
opcodes' names alone; what they compute is checked against the software GPU (``tests/native``).
"""

from collections.abc import Sequence

from phosd.engine.analysis.values.conditions import Carry, Condition
from phosd.engine.analysis.values.terms import (
    ZERO,
    Term,
    difference,
    modulo,
    number,
    scaled,
    total,
)
from phosd.engine.analysis.values.words import WIDE, Word, Words

MINUS_ONE = number(-1)
Signed = tuple[bool, Word]
"""A word, and whether it is inverted (``~``)."""


def add_with_carry(
    words: Words, highs: Sequence[Signed], carries: Sequence[Condition]
) -> Word | None:
    """Return the upper half of the sum whose lower half gave these carries. None: these are not
    the carries of a sum that the words belong to.
    """
    known = _of_one_sum(words, [carry for carry in carries if isinstance(carry, Carry)])
    others = [carry for carry in carries if not isinstance(carry, Carry)]
    if not known or any(other is not False for other in others):
        return None
    first = known[0]
    if {carry.ordinal for carry in known} != set(range(_carries(first))):
        return None
    if any((carry.plus, carry.minus) != (first.plus, first.minus) for carry in known):
        return None
    added = [word for inverted, word in highs if not inverted]
    taken = [word for inverted, word in highs if inverted]
    while len(taken) < len(first.minus) and MINUS_ONE in added:  # that is zero, inverted
        added.remove(MINUS_ONE)
        taken.append(ZERO)
    plus = _assemble(words, first.plus, added)
    minus = _assemble(words, first.minus, taken, True)
    if plus is None or minus is None:
        return None
    return words.high(difference(plus, minus))


def _of_one_sum(words: Words, carries: list[Carry]) -> list[Carry]:
    """Return the carries of the sum of three whose lower halves were added one after the other, if
    these are the carries of the two additions.
    """
    if len(carries) != 2 or any(one.minus or len(one.plus) != 2 for one in carries):
        return carries
    for one, other in (carries, carries[::-1]):
        first = words.atoms.low(total(*one.plus))
        if first in other.plus:
            rest = list(other.plus)
            rest.remove(first)
            plus = (*one.plus, *rest)
            return [Carry(plus, (), ordinal) for ordinal in range(2)]
    return carries


def _carries(carry: Carry) -> int:
    """Return how many carries the sum has."""
    return max(len(carry.plus) + len(carry.minus) - 1, 1)


def _assemble(
    words: Words, lows: Sequence[Term], highs: list[Word], each: bool = False
) -> Term | None:
    """Return the sum of 64-bit numbers with these lower and upper halves; any lower half may
    belong to any upper one. With ``each`` there must be as many upper as lower halves: every
    inverted word adds one that another must take away.
    """
    left = [high for high in highs if each or not _is_zero(high)]
    if each and len(left) != len(lows):
        return None
    result = ZERO
    alone = []
    for low in lows:
        match = next((high for high in left if words.fits(low, high)), None)
        if match is None:
            alone.append(low)
            continue
        left.remove(match)
        result = total(result, words.pair(low, match))
    for low in alone:
        result = total(result, words.pair(low, left.pop(0) if left else ZERO))
    for high in left:
        result = total(result, scaled(words.term(high), WIDE))
    return result


def _is_zero(word: Word) -> bool:
    return isinstance(word, Term) and not word.parts


def shift(words: Words, modifiers: Sequence[str], low: Word, by: int, high: Word) -> Word | None:
    """Return what ``SHF`` and ``USHF`` make of two words, shifted by a constant."""
    atoms = words.atoms
    way, *rest = modifiers
    wraps, upper = "W" in rest, "HI" in rest
    kind = next((word for word in rest if word in ("U32", "S32", "U64", "S64")), "")
    limit = 64 if kind in ("U64", "S64") else 32
    by = by % limit if wraps else min(by, limit)
    if way == "L" and not upper and kind in ("U32", "S32"):
        return modulo(scaled(words.term(low), 1 << by), 32)
    if way == "L" and upper and kind in ("U64", "S64"):
        return words.high(scaled(words.pair(low, high), 1 << by))
    if way != "R":
        return None
    if upper and kind == "U32":
        return atoms.low(atoms.quotient(atoms.unsigned(32, words.term(high)), 1 << by))
    if upper and kind == "S32":
        if by >= 31:
            return words.high(atoms.signed(32, words.term(high)))
        return atoms.low(atoms.quotient(atoms.signed(32, words.term(high)), 1 << by))
    if not upper and kind in ("U64", "S64"):
        return atoms.low(atoms.quotient(words.pair(low, high), 1 << by)) if by <= 32 else None
    return None


def carry(plus: Sequence[Term], minus: Sequence[Term], ordinal: int) -> Condition:
    """Return a carry of the sum; False if there can be none."""
    plus = [term for term in plus if term.parts]
    if not minus and len(plus) <= 1:
        return False
    return Carry(tuple(plus), tuple(minus), ordinal)


def add_shifted(words: Words, shifted: Term, base: Word, into: Condition) -> Word | None:
    """Return the upper half of the sum of ``shifted`` and a 64-bit number whose upper half is
    ``base``, if ``into`` is the carry of the sum of the lower halves.
    """
    low = words.atoms.low(shifted)
    if into is False:  # one of the lower halves is 0
        return words.high(shifted) if base == ZERO else None
    if not isinstance(into, Carry) or into.minus or len(into.plus) != 2 or low not in into.plus:
        return None
    other = into.plus[1] if into.plus[0] == low else into.plus[0]
    return words.high(total(shifted, words.pair(other, base)))
