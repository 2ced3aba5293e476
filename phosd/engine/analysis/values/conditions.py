"""What a predicate register holds, and what follows from it.

A condition is a :class:`Compare` of two numbers, a :class:`Table` of three conditions, a constant,
or :class:`Carry` and :class:`Opaque`, of which nothing follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from phosd.engine.analysis.values.terms import Term, given_by_launch

_NEGATED = {"LT": "GE", "GE": "LT", "LE": "GT", "GT": "LE", "EQ": "NE", "NE": "EQ"}
COMPARISONS = frozenset(_NEGATED)


@dataclass(frozen=True)
class Compare:
    """``one`` and ``other`` compared as machine words of ``width`` bits."""

    how: str
    signed: bool
    width: int
    one: Term
    other: Term


@dataclass(frozen=True)
class Table:
    """A function of three conditions: bit 4a + 2b + c of ``bits`` is its value."""

    bits: int
    of: tuple["Condition", "Condition", "Condition"]


@dataclass(frozen=True)
class Carry:
    """A carry out of bit 31 of the sum of these terms' lowest 32 bits; ``ordinal`` is 1 for the
    second carry of a sum of three. A term that is subtracted is in ``minus``: its complement and
    one are added.
    """

    plus: tuple[Term, ...]
    minus: tuple[Term, ...]
    ordinal: int


@dataclass(frozen=True)
class Opaque:
    """A condition of which nothing is known; ``place`` tells it from others."""

    place: object
    inverted: bool = False


Condition: TypeAlias = bool | Compare | Table | Carry | Opaque

Facts: TypeAlias = frozenset[Condition]
"""Conditions that hold."""


def negated(condition: Condition) -> Condition:
    """Return the opposite."""
    match condition:
        case bool():
            return not condition
        case Compare(how, signed, width, one, other):
            return Compare(_NEGATED[how], signed, width, one, other)
        case Table(bits, of):
            return Table(bits ^ 0xFF, of)
        case Carry():
            return Opaque(condition)
        case Opaque(place, inverted):
            return place if isinstance(place, Carry) else Opaque(place, not inverted)


def is_plain(condition: Condition) -> bool:
    """Return whether this one of two opposite conditions stands for both."""
    match condition:
        case Compare(how):
            return how in ("LT", "LE", "EQ")
        case Table(bits):
            return bits & 1 == 0
        case Opaque(place, inverted):
            return not inverted and not isinstance(place, Carry)
    return True


def table(bits: int, a: Condition, b: Condition, c: Condition) -> Condition:
    """Return the function of three conditions in its simplest form."""
    of = [a, b, c]
    for place, condition in enumerate(of):
        if isinstance(condition, bool):
            bits = _fixed(bits, place, condition)
            of[place] = True
    needed = [
        place for place in range(3) if _fixed(bits, place, True) != _fixed(bits, place, False)
    ]
    if not needed:
        return bits == 0xFF
    if len(needed) == 1:
        (place,) = needed
        return of[place] if bits == _MASKS[place] else negated(of[place])
    first, second, third = (of[place] if place in needed else True for place in range(3))
    return Table(bits, (first, second, third))


_MASKS = (0xF0, 0xCC, 0xAA)
"""Where the first, the second and the third condition are true."""


def _fixed(bits: int, place: int, value: bool) -> int:
    """Return the table where a condition has this value, whatever it has."""
    kept = bits & (_MASKS[place] if value else _MASKS[place] ^ 0xFF)
    distance = 4 >> place
    return kept | (kept >> distance if value else kept << distance) & 0xFF


def implied(condition: Condition) -> Iterator[Condition]:
    """Yield what holds if the condition does: itself, and what a table needs to be true."""
    if isinstance(condition, bool):
        return
    yield condition
    if isinstance(condition, Table):
        for place, inner in enumerate(condition.of):
            if condition.bits & ~_MASKS[place] & 0xFF == 0:
                yield from implied(inner)
            elif condition.bits & _MASKS[place] == 0:
                yield from implied(negated(inner))


def of_launch(condition: Condition) -> bool:
    """Return whether parameters and dimensions alone decide a condition."""
    return isinstance(condition, Compare) and all(
        given_by_launch(term) for term in (condition.one, condition.other)
    )


def alternative(key: tuple[Any, ...], facts: Facts) -> int | None:
    """Return which alternative a choice with this key takes, if facts decide that: ``("if",
    condition)`` takes the first where the condition holds, and the second elsewhere.
    """
    if key[0] != "if":
        return None
    condition = key[1]
    if condition in facts:
        return 0
    return 1 if negated(condition) in facts or _excluded(condition, facts) else None


def _excluded(condition: Condition, facts: Facts) -> bool:
    """Return whether a number that is to be equal to one is known to be equal to another."""
    if not isinstance(condition, Compare) or condition.how != "EQ":
        return False
    if condition.other.constant is None:
        return False
    return any(
        isinstance(fact, Compare)
        and fact.how == "EQ"
        and fact.one == condition.one
        and fact.width == condition.width
        and fact.other.constant not in (None, condition.other.constant)
        for fact in facts
    )


def simplified(condition: Table, facts: Facts) -> Condition:
    """Return the condition with the constants that facts make of those that it is made of."""
    fixed = [
        True if one in facts else False if negated(one) in facts else one for one in condition.of
    ]
    return table(condition.bits, *fixed)
