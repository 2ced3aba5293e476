"""Turn what an address is made of into sums of unknowns, for one launch.

Every atom becomes a number, an unknown with bounds, or a sum of those. Unknowns are thread and
block indices, the iterations of loops, and what a machine word loses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phosd.engine.analysis.alternatives import depth_of
from phosd.engine.analysis.reference import linear
from phosd.engine.analysis.reference.iterations import Comparison, limits
from phosd.engine.analysis.reference.linear import Bounds, Contradiction, Linear, System
from phosd.engine.analysis.thread.followed import Followed
from phosd.engine.analysis.values.conditions import Compare, Condition, Facts, alternative, negated
from phosd.engine.analysis.values.terms import (
    Atom,
    Kind,
    Monomial,
    Term,
    TooLarge,
    carried_by,
    smallest,
)
from phosd.engine.analysis.values.words import ELSEWHERE

ADDRESSES = 1 << 64


@dataclass(frozen=True)
class Launch:
    """The bytes of the parameters, and the sizes of a block and of the grid."""

    parameters: bytes
    block: tuple[int, int, int]
    grid: tuple[int, int, int]

    def dimension(self, name: str) -> int:
        """Return ``ntid.x`` to ``nctaid.z``."""
        sizes = self.block if name.startswith("ntid") else self.grid
        return sizes["xyz".index(name[-1])]

    def parameter(self, offset: int, size: int) -> int:
        """Return bytes of the parameters as a number."""
        return int.from_bytes(self.parameters[offset : offset + size], "little")


@dataclass(frozen=True)
class Assumed:
    """Which alternative each choice takes, by its key, and which loops are in their first
    iteration.
    """

    chosen: Mapping[tuple[Any, ...], int]
    first: Mapping[int, bool]


NOTHING = Assumed({}, {})


class Evaluation:
    """The values that the atoms of one alternative have for a launch, and what holds of them."""

    def __init__(
        self, followed: Followed, facts: Facts, launch: Launch, assumed: Assumed = NOTHING
    ) -> None:
        self._followed = followed
        self._launch = launch
        self._assumed = assumed
        self.system = System()
        self._atoms: dict[Atom, Linear] = {}
        self._counts: dict[int, Linear] = {}
        self._given = facts
        self._facts = sorted(facts, key=depth_of)

    def bounds(self, address: Term) -> Bounds | None:
        """Return the bounds of an address; None if this case cannot be."""
        try:
            for fact in self._facts:
                self._constrain(fact)
            for key, place in self._assumed.chosen.items():
                if key[0] == "if":
                    self._constrain(key[1] if place == 0 else negated(key[1]))
            return self.system.bounds(self.sum_of(address))
        except Contradiction:
            return None

    def sum_of(self, address: Term) -> Linear:
        """Return an address as a sum of unknowns of ``system``, modulo 2^64."""
        return self._linear(address).modulo(ADDRESSES)

    # Terms.

    def _linear(self, term: Term) -> Linear:
        result = linear.number(0)
        for monomial, factor in term.parts.items():
            result = result.plus(self._monomial(monomial), factor)
        return result

    def _monomial(self, monomial: Monomial) -> Linear:
        result = linear.number(1)
        for atom in monomial:
            other = self._atom(atom)
            if not result.factors:
                result = other.times(result.constant)
            elif not other.factors:
                result = result.times(other.constant)
            else:
                result = self._product(result, other, (monomial, atom))
        return result

    def _product(self, one: Linear, other: Linear, key: object) -> Linear:
        ends = [*self.system.bounds(one), *self.system.bounds(other)]
        known = [end for end in ends if end is not None]
        if len(known) < 4:
            return self.system.unknown(key, (None, None))
        products = [left * right for left in known[:2] for right in known[2:]]
        return self.system.unknown(key, (min(products), max(products)))

    def _atom(self, atom: Atom) -> Linear:
        found = self._atoms.get(atom)
        if found is None:
            found = self._atoms[atom] = self._new(atom)
        return found

    def _new(self, atom: Atom) -> Linear:
        match atom.kind, atom.args:
            case Kind.PARAMETER, (offset, size):
                return linear.number(self._launch.parameter(offset, size))
            case Kind.DIMENSION, (name,):
                return linear.number(self._launch.dimension(name))
            case Kind.THREAD, (name,):
                return self.system.unknown(atom, (0, self._threads(name) - 1))
            case Kind.SIGNED, (width, term):
                half = 1 << (width - 1)
                return self._word(atom, self._linear(term), -half, half)
            case Kind.UNSIGNED, (width, term):
                return self._word(atom, self._linear(term), 0, 1 << width)
            case Kind.REMAINDER, (term, power):
                return self._word(atom, self._linear(term), 0, power)
            case Kind.QUOTIENT, (term, divisor):
                return self._quotient(atom, self._linear(term), divisor)
            case Kind.COMMON, (terms,):
                return self._common(atom, terms)
            case Kind.CHOICE, (key, terms):
                return self._choice(atom, key, terms)
            case Kind.EXTREME, (which, terms):
                return self._extreme(atom, which, [self._linear(term) for term in terms])
            case Kind.LOOP, (header, _, width):
                return self._carried(atom, header, width)
        return self.system.unknown(atom, self._narrow(atom))

    def _threads(self, name: str) -> int:
        if name == "laneid":
            return 32
        return self._launch.dimension("n" + name)

    def _narrow(self, atom: Atom) -> Bounds:
        """Return the bounds of what is unknown, if it has fewer values than its register."""
        if atom.range is None or atom.range[1] - atom.range[0] >= (1 << 31):
            return None, None
        return atom.range

    def _word(self, atom: linear.Unknown, inner: Linear, least: int, end: int) -> Linear:
        """Return the number that is equal to ``inner`` modulo a power of two, which is
        ``end`` minus ``-end`` or 0, and is from ``least`` to ``end`` - 1.
        """
        size = end - least
        inner = inner.modulo(size)
        low, high = self.system.bounds(inner)
        if low is not None and high is not None:
            around = (low - least) // size
            if (high - least) // size == around:
                return inner.moved(-around * size)
            return self.system.unknown(atom, (least, end - 1))
        small = size <= 1 << 31
        return self.system.unknown(atom, (least, end - 1) if small else (None, None))

    def _quotient(self, atom: Atom, inner: Linear, divisor: int) -> Linear:
        if all(factor % divisor == 0 for factor in inner.factors.values()):
            exact = {one: factor // divisor for one, factor in inner.factors.items()}
            return Linear(inner.constant // divisor, exact)
        low, high = self.system.bounds(inner)
        result = self.system.unknown(
            atom,
            (None if low is None else low // divisor, None if high is None else high // divisor),
        )
        rest = inner.plus(result, -divisor)
        self.system.hold(rest)
        self.system.hold(rest.times(-1).moved(divisor - 1))
        return result

    def _common(self, atom: Atom, terms: tuple[Term, ...]) -> Linear:
        """Neither word is less than the bits that both have."""
        least = atom.range[1] if atom.range else (1 << 32) - 1
        words = []
        for term in terms:
            word = self.system.as_word(self._linear(term), 0, 1 << 32)
            if word is not None:
                words.append(word[0])
                least = min(least, word[1][1])
        result = self.system.unknown(atom, (0, least) if least < 1 << 31 else (None, None))
        for one in words:
            self.system.hold(one.plus(result, -1))
        return result

    def _choice(self, atom: Atom, key: tuple[Any, ...], terms: tuple[Term, ...]) -> Linear:
        if key[0] == ELSEWHERE:
            # Other facts may hold of another thread, and it may be in another iteration.
            other = Evaluation(self._followed, frozenset(), self._launch)
            return self.system.unknown(atom, other.system.bounds(other._linear(terms[0])))
        place = self._assumed.chosen.get(key)
        places = self.places(key, len(terms)) if place is None else [place]
        if len(places) == 1:
            return self._linear(terms[places[0]])
        every = [self.system.bounds(self._linear(terms[place])) for place in places]
        lows = [low for low, _ in every if low is not None]
        highs = [high for _, high in every if high is not None]
        return self.system.unknown(
            atom,
            (
                min(lows) if len(lows) == len(every) else None,
                max(highs) if len(highs) == len(every) else None,
            ),
        )

    def places(self, key: tuple[Any, ...], count: int) -> Sequence[int]:
        """Return which of its alternatives a choice may take in this launch."""
        known = alternative(key, self._given)
        if known is not None:
            return (known,)
        found: Sequence[int] = range(count)
        if key[0] == "if":
            holds = self._holds(key[1])
            found = (0, 1) if holds is None else (0,) if holds else (1,)
        elif key[0] == "meet":
            ways = self._followed.met[key[1]]
            found = [
                place
                for place in found
                if not any(self._holds(fact) is False for fact in ways[place])
            ]
        return found or range(count)

    def _extreme(self, atom: Atom, which: str, terms: list[Linear]) -> Linear:
        sign = 1 if which == "max" else -1
        every = [self.system.bounds(term.times(sign)) for term in terms]
        lows = [low for low, _ in every if low is not None]
        highs = [high for _, high in every if high is not None]
        low = max(lows, default=None)
        high = max(highs) if len(highs) == len(every) else None
        result = self.system.unknown(atom, (low, high)).times(sign) if sign > 0 else None
        if result is None:
            ends = (None if high is None else -high, None if low is None else -low)
            result = self.system.unknown(atom, ends)
        for term in terms:
            self.system.hold(result.plus(term, -1).times(sign))
        return result

    # Loops.

    def _carried(self, atom: Atom, header: int, width: int) -> Linear:
        carried = self._followed.carried[atom]
        loop = self._followed.loops[header]
        initial = self._linear(carried.initial)
        if self._assumed.first.get(header):
            return initial
        step = carried.step(atom, loop, width)
        each = None if step is None else self._linear(step)
        if each is None or each.factors:
            return self.system.unknown(atom, self._towards(initial, each))
        constant = smallest(each.constant, 1 << width)
        return initial.plus(self._iterations(header), constant) if constant else initial

    def _towards(self, initial: Linear, each: Linear | None) -> Bounds:
        """Return the bounds of what changes in each iteration by another number."""
        if each is None:
            return None, None
        low, high = self.system.bounds(each)
        if low is not None and low >= 0:
            return self.system.bounds(initial)[0], None
        if high is not None and high <= 0:
            return None, self.system.bounds(initial)[1]
        return None, None

    def _iterations(self, header: int) -> Linear:
        """Return the number of iterations before this one."""
        count = self._counts.get(header)
        if count is None:
            key = ("iterations", header)
            later = self._assumed.first.get(header) is False
            least = 1 if later else 0
            self._counts[header] = self.system.unknown(key, (least, None))
            most = min(self._limits(header, key, later), default=None)
            if most is not None and most < least:
                raise Contradiction
            count = self._counts[header] = self.system.unknown(key, (least, most))
        return count

    def _limits(self, header: int, count: linear.Unknown, later: bool) -> Iterator[int]:
        loop = self._followed.loops[header]
        changes = loop.changes() - {carried_by(header)}
        for fact in self._followed.again[header]:
            # It is about the iteration before: what else it tells of must still be the same.
            if isinstance(fact, Compare) and not (fact.one.born | fact.other.born) & changes:
                one, other = self._linear(fact.one), self._linear(fact.other)
                comparison = Comparison(fact.how, fact.signed, fact.width, one, other, count)
                yield from limits(self.system, comparison, later)

    # Conditions.

    def _sides(self, fact: Compare) -> tuple[Linear, Linear]:
        return self._extended(fact, fact.one), self._extended(fact, fact.other)

    def _extended(self, fact: Compare, term: Term) -> Linear:
        """Return the number that is compared."""
        atoms = self._followed.atoms
        try:
            extend = atoms.signed if fact.signed else atoms.unsigned
            return self._linear(extend(fact.width, term))
        except TooLarge:  # no address has such an atom
            least = -(1 << (fact.width - 1)) if fact.signed else 0
            key = (fact.signed, fact.width, term)
            return self._word(key, self._linear(term), least, least + (1 << fact.width))

    def _constrain(self, fact: Condition) -> None:
        if not isinstance(fact, Compare):
            return
        one, other = self._sides(fact)
        if fact.how in ("GT", "GE"):
            one, other = other, one
        match fact.how:
            case "LT" | "GT":
                self.system.hold(other.plus(one, -1).moved(-1))
            case "LE" | "GE":
                self.system.hold(other.plus(one, -1))
            case "EQ":
                self.system.hold(other.plus(one, -1))
                self.system.hold(one.plus(other, -1))
        if not fact.signed and fact.how in ("LT", "LE", "GT", "GE"):
            smaller = fact.one if fact.how in ("LT", "LE") else fact.other
            self._between(smaller, other, fact.width, fact.how in ("LT", "GT"))

    def _between(self, smaller: Term, larger: Linear, width: int, strict: bool) -> None:
        """Note what an unsigned comparison says of a number that may be negative: as long as it is
        not so negative that it would seem small, it is not negative.
        """
        one = self._linear(smaller)
        low, _ = self.system.bounds(one)
        _, high = self.system.bounds(one)
        _, most = self.system.bounds(larger)
        size = 1 << width
        if low is None or high is None or most is None or high >= size:
            return
        if low > most - size and most < size:
            self.system.hold(one)
            self.system.hold(larger.plus(one, -1).moved(-1 if strict else 0))

    def _holds(self, condition: Condition) -> bool | None:
        """Return whether a condition holds for all threads, or for none; None: neither is known."""
        if isinstance(condition, bool):
            return condition
        if not isinstance(condition, Compare):
            return None
        try:
            one, other = self._sides(condition)
            low, high = self.system.bounds(other.plus(one, -1))
        except Contradiction:  # an undecidable condition must not fail the evaluation
            return None
        if low is None or high is None:
            return None
        always, never = {
            "LT": (low > 0, high <= 0),
            "LE": (low >= 0, high < 0),
            "GT": (high < 0, low >= 0),
            "GE": (high <= 0, low > 0),
            "EQ": (low == high == 0, low > 0 or high < 0),
            "NE": (low > 0 or high < 0, low == high == 0),
        }[condition.how]
        return True if always else False if never else None
