"""Say how often a loop goes on, from what holds whenever it does.

A condition holds at the end of each iteration but the last. It compares a number that changes by
the same step each time with one that stays: so there is an iteration that must be the last.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from phosd.engine.analysis.reference import linear
from phosd.engine.analysis.reference.linear import Linear, System

_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


@dataclass(frozen=True)
class Comparison:
    """A comparison of words of ``width`` bits, both of them sums in which ``count``, the number of
    iterations before this one, is an unknown.
    """

    how: str
    signed: bool
    width: int
    one: Linear
    other: Linear
    count: linear.Unknown


def limits(system: System, comparison: Comparison, later: bool) -> Iterator[int]:
    """Yield how many iterations there are before the last, at most. With ``later``, this is not the
    first iteration: the comparison held at the end of the one before, which is noted.
    """
    how, one, other = comparison.how, comparison.one, comparison.other
    if comparison.count in other.factors:
        one, other = other, one
        how = _SWAPPED.get(how, how)
    step = one.factors.get(comparison.count, 0)
    if not step or comparison.count in other.factors:
        return
    size = 1 << comparison.width
    least = -(size >> 1) if comparison.signed else 0
    start = one.plus(linear.unknown(comparison.count), -step)
    if how == "NE":
        yield from _until_equal(system, start, other, step, comparison)
        return
    first, compared = system.as_word(start, least, size), system.as_word(other, least, size)
    if first is None or compared is None:
        return
    start, (start_low, start_high) = first
    other, (other_low, other_high) = compared
    one = start.plus(linear.unknown(comparison.count), step)
    strict = 1 if how in ("LT", "GT") else 0
    # The word never wraps: as long as it goes on, one step more is still a number of this width.
    if how in ("LT", "LE") and step > 0 and other_high - strict + step < least + size:
        last = other_high - strict - start_low
        rest = other.plus(one, -1).moved(-strict)
    elif how in ("GT", "GE") and step < 0 and other_low + strict + step >= least:
        last = start_high - other_low - strict
        rest = one.plus(other, -1).moved(-strict)
    else:
        return
    if later:
        system.hold(rest.moved(-rest.factors[comparison.count]))
    yield last // abs(step) + 1 if last >= 0 else 0


def _until_equal(
    system: System, start: Linear, end: Linear, step: int, comparison: Comparison
) -> Iterator[int]:
    """Yield how many steps of one size lead to ``end``, if it is met exactly."""
    size = 1 << comparison.width
    way = (end.plus(start, -1) if step > 0 else start.plus(end, -1)).modulo(size)
    step = abs(step)
    found = system.as_word(way, 0, size)
    if found is None:
        return
    way, (_, high) = found
    if way.constant % step == 0 and all(factor % step == 0 for factor in way.factors.values()):
        system.hold(way.plus(linear.unknown(comparison.count), -step))
        yield high // step
