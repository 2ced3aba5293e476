"""Sums of unknowns with factors, and the range that they can have.

An unknown has bounds, and there may be constraints, each a sum that is not negative. The range of a
sum is looked for by taking multiples of constraints away from it until bounds are all that is
left: what is found is always a range that the sum is in, and not always the smallest.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from phosd.engine.analysis.values.terms import smallest

Unknown: TypeAlias = Hashable
Bounds: TypeAlias = tuple[int | None, int | None]
"""The least and the greatest value; None: there is none that is known."""

_DEEPEST = 3
_MOST_CONSTRAINTS = 24


@dataclass(frozen=True)
class Linear:
    """A number and the factor of each unknown, never 0."""

    constant: int
    factors: Mapping[Unknown, int]

    def plus(self, other: "Linear", factor: int = 1) -> "Linear":
        """Return the sum of this one and ``factor`` times the other."""
        factors = dict(self.factors)
        for unknown, each in other.factors.items():
            new = factors.get(unknown, 0) + factor * each
            if new:
                factors[unknown] = new
            else:
                factors.pop(unknown, None)
        return Linear(self.constant + factor * other.constant, factors)

    def times(self, factor: int) -> "Linear":
        """Return a multiple of this one."""
        if not factor:
            return Linear(0, {})
        return Linear(self.constant * factor, {u: f * factor for u, f in self.factors.items()})

    def modulo(self, size: int) -> "Linear":
        """Return the sum with the smallest factors that is the same modulo a power of two."""
        factors = {one: smallest(factor, size) for one, factor in self.factors.items()}
        kept = {one: factor for one, factor in factors.items() if factor}
        return Linear(smallest(self.constant, size), kept)

    def moved(self, by: int) -> "Linear":
        """Return the sum of this one and a number."""
        return Linear(self.constant + by, self.factors)


def number(value: int) -> Linear:
    """Return a sum that is only a number."""
    return Linear(value, {})


class Contradiction(Exception):
    """What was noted cannot hold."""


class System:
    """Unknowns with their bounds, and sums of them that are not negative."""

    def __init__(self) -> None:
        self._known: dict[Unknown, Bounds] = {}
        self._constraints: list[Linear] = []

    def unknown(self, one: Unknown, within: Bounds) -> Linear:
        """Note the bounds of an unknown, and return it as a sum."""
        if within[0] is not None and within[0] == within[1]:
            return number(within[0])
        self._known[one] = within
        return Linear(0, {one: 1})

    def hold(self, constraint: Linear) -> None:
        """Note that a sum is not negative. Raises :class:`Contradiction` if it always is."""
        if constraint.factors:
            self._constraints.append(constraint)
        elif constraint.constant < 0:
            raise Contradiction

    def bounds(self, one: Linear) -> Bounds:
        """Return bounds of a sum. Raises :class:`Contradiction` if there is no such number."""
        few = self._constraints[-_MOST_CONSTRAINTS:]
        low = _least(one, self._known, few, _DEEPEST)
        high = _least(one.times(-1), self._known, few, _DEEPEST)
        high = None if high is None else -high
        if low is not None and high is not None and low > high:
            raise Contradiction
        return low, high

    def as_word(self, one: Linear, least: int, size: int) -> tuple[Linear, tuple[int, int]] | None:
        """Return the number from ``least`` on that is equal to the sum modulo ``size``, a power of
        two, with its bounds. None: it is not the same sum for all threads.
        """
        one = one.modulo(size)
        low, high = self.bounds(one)
        if low is None or high is None or (low - least) // size != (high - least) // size:
            return None
        by = -((low - least) // size) * size
        return one.moved(by), (low + by, high + by)


def unknown(one: Unknown) -> Linear:
    """Return a sum that is only an unknown, whose bounds are noted elsewhere."""
    return Linear(0, {one: 1})


def _least(
    linear: Linear, known: Mapping[Unknown, Bounds], constraints: Sequence[Linear], depth: int
) -> int | None:
    """Return a number that the sum is not below."""
    best: int | None = linear.constant
    for one, factor in linear.factors.items():
        end = known[one][0 if factor > 0 else 1]
        best = None if end is None or best is None else best + factor * end
    if depth == 0:
        return best
    for place, constraint in enumerate(constraints):
        for one, factor in constraint.factors.items():
            ours = linear.factors.get(one, 0)
            # What is taken away must be positive, and cancel this unknown.
            if ours * factor <= 0:
                continue
            scale = abs(factor)
            rest = linear.times(scale).plus(constraint, -abs(ours))
            if len(rest.factors) > len(linear.factors) + 1:
                continue
            others = [*constraints[:place], *constraints[place + 1 :]]
            found = _least(rest, known, others, depth - 1)
            if found is not None:
                found = -(-found // scale)
                best = found if best is None else max(best, found)
    return best
