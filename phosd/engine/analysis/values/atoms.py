"""Make the atoms of a kernel, and the terms that they are.

There is one atom for each kind and arguments, so that equal terms have equal atoms; and where a
simpler term is equal, it is made instead.
"""

from typing import Any

from phosd.engine.analysis.values.terms import (
    GREATEST,
    Atom,
    Kind,
    Monomial,
    Range,
    Term,
    carried_by,
    hull,
    modulo,
    number,
    product,
    range_of,
    smallest,
    total,
)


class Atoms:
    """The atoms of one kernel: there is one for each kind and arguments, so that equal terms have
    equal atoms.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Term] = {}

    def _get(self, kind: Kind, args: tuple[Any, ...], born: frozenset[int], within: Range) -> Term:
        key = (kind, *args)
        term = self._known.get(key)
        if term is None:
            term = self._known[key] = Term({(Atom(kind, args, born, within),): 1})
        return term

    def parameter(self, offset: int, size: int) -> Term:
        return self._get(Kind.PARAMETER, (offset, size), frozenset(), (0, (1 << 8 * size) - 1))

    def indexed(self, offset: Term, size: int) -> Term:
        return self._get(Kind.INDEXED, (offset, size), offset.born, (0, (1 << 8 * size) - 1))

    def dimension(self, name: str) -> Term:
        return self._get(Kind.DIMENSION, (name,), frozenset(), (1, GREATEST[name]))

    def thread(self, name: str) -> Term:
        return self._get(Kind.THREAD, (name,), frozenset(), (0, GREATEST[name] - 1))

    def unknown(
        self,
        place: object,
        register: object,
        block: int | None,
        why: str,
        width: int,
        within: Range = None,
    ) -> Term:
        """Return any value; ``block`` gives it a new one each time it runs."""
        within = within or (0, (1 << width) - 1)
        born = frozenset(() if block is None else (block,))
        return self._get(Kind.UNKNOWN, (place, register, width, why), born, within)

    def loop(self, header: int, register: object, width: int) -> Term:
        born = frozenset((carried_by(header),))
        return self._get(Kind.LOOP, (header, register, width), born, None)

    def signed(self, width: int, term: Term) -> Term:
        """Return the number that the lowest ``width`` bits are in two's complement."""
        term = self.low(term) if width == 32 else modulo(term, width)
        half = 1 << (width - 1)
        if (constant := term.constant) is not None:
            return number(smallest(constant, 2 * half))
        within = range_of(term)
        if within and -half <= within[0] and within[1] < half:
            return term
        return self._get(Kind.SIGNED, (width, term), term.born, (-half, half - 1))

    def unsigned(self, width: int, term: Term) -> Term:
        """Return the number that the lowest ``width`` bits are."""
        term = self.low(term) if width == 32 else modulo(term, width)
        whole = 1 << width
        if (constant := term.constant) is not None:
            return number(constant % whole)
        within = range_of(term)
        if within and within[0] >= 0 and within[1] < whole:
            return term
        return self._get(Kind.UNSIGNED, (width, term), term.born, (0, whole - 1))

    def quotient(self, term: Term, divisor: int) -> Term:
        """Return the quotient, rounded down."""
        if (constant := term.constant) is not None:
            return number(constant // divisor)
        if all(factor % divisor == 0 for factor in term.parts.values()):
            return Term({atoms: factor // divisor for atoms, factor in term.parts.items()})
        inner = term.atom
        if inner and inner.kind is Kind.QUOTIENT:
            return self.quotient(inner.args[0], inner.args[1] * divisor)
        within = range_of(term)
        if within:
            within = within[0] // divisor, within[1] // divisor
            if within[0] == within[1]:
                return number(within[0])
        return self._get(Kind.QUOTIENT, (term, divisor), term.born, within)

    def remainder(self, term: Term, power: int) -> Term:
        """Return the term modulo a power of two of at most 2^32."""
        kept = {}
        for atoms, factor in self.low(term).parts.items():
            if factor := smallest(factor, power):
                kept[atoms] = factor
        term = Term(kept)
        if (constant := term.constant) is not None:
            return number(constant % power)
        within = range_of(term)
        if within and within[0] >= 0 and within[1] < power:
            return term
        return self._get(Kind.REMAINDER, (term, power), term.born, (0, power - 1))

    def common(self, one: Term, other: Term) -> Term:
        """Return the bits that two words have in common."""
        ends = [
            within[1]
            for within in map(range_of, (one, other))
            if within and within[0] >= 0 and within[1] < 1 << 32
        ]
        words = (one, other)
        within = 0, min(ends, default=(1 << 32) - 1)
        return self._get(Kind.COMMON, (words,), one.born | other.born, within)

    def choice(self, key: tuple[Any, ...], terms: tuple[Term, ...], born: frozenset[int]) -> Term:
        """Return one of the terms. Equal keys choose alike, and ``born`` is when they do anew."""
        if len(terms) > 1 and all(term == terms[0] for term in terms):
            return terms[0]
        within = hull(map(range_of, terms))
        return self._get(Kind.CHOICE, (key, terms), born.union(*(t.born for t in terms)), within)

    def extreme(self, which: str, terms: tuple[Term, ...]) -> Term:
        """Return the least (``min``) or the greatest (``max``) of the terms."""
        if all(term == terms[0] for term in terms):
            return terms[0]
        ranges = [range_of(term) for term in terms]
        within: Range = None
        if None not in ranges:
            pick = min if which == "min" else max
            known = [one for one in ranges if one]
            within = pick(one[0] for one in known), pick(one[1] for one in known)
        born = frozenset[int]().union(*(term.born for term in terms))
        return self._get(Kind.EXTREME, (which, terms), born, within)

    def low(self, term: Term) -> Term:
        """Return the form that all terms have which are equal in their lowest 32 bits because of
        how they were extended.
        """
        if term._low is None:
            low = self._low(term)
            term._low = low
            low._low = low
        return term._low

    def _low(self, term: Term) -> Term:
        found = modulo(term, 32)
        if not any(atom.wide for atoms in found.parts for atom in atoms):
            return found
        kept: dict[Monomial, int] = {}
        more = []
        for atoms, factor in found.parts.items():
            if not any(atom.wide for atom in atoms):
                kept[atoms] = factor
                continue
            part = number(factor)
            for atom in atoms:
                part = product(part, self._narrow(atom))
            more.append(part)
        return modulo(total(Term(kept), *more), 32)

    def _narrow(self, atom: Atom) -> Term:
        if atom.kind in (Kind.SIGNED, Kind.UNSIGNED) and atom.args[0] >= 32:
            inner: Term = atom.args[1]
            return self.low(inner)
        if atom.kind is Kind.PARAMETER and atom.args[1] == 8:
            return self.parameter(atom.args[0], 4)
        if atom.kind is Kind.CHOICE:
            key, terms = atom.args
            return self.choice(key, tuple(map(self.low, terms)), atom.born)
        return Term({(atom,): 1})
