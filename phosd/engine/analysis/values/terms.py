"""Integers that a kernel computes with, as polynomials over what is known only later.

A :class:`Term` is an exact integer, without a width: an integer polynomial over :class:`Atom`
objects. A register holds a term *modulo* 2^32, a pair of registers one modulo 2^64 (``words``), so
that sums, differences and products never lose anything. Where a machine word is taken for a number
again, to extend it, divide it or compare it, there is an atom that says so: ``signed`` and
``unsigned`` are the numbers that the lowest bits of a term stand for.

Equal terms are equal objects' values: all are built by the functions here, which keep one form.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import count
from typing import Any, TypeAlias

Range: TypeAlias = tuple[int, int] | None
"""The least and the greatest value; None: nothing is known."""

MAX_MONOMIALS = 64
MAX_DEPTH = 24
"""Most levels of atoms within atoms. What is nested deeper is of no use: it is computed step by
step.
"""
_numbers = count()


class TooLarge(Exception):
    """A term is too long, or nested too deep, to go on with."""


class Kind(Enum):
    """What an atom stands for, and its arguments."""

    __hash__ = object.__hash__  # Enum's own is slow, and atoms are looked up by their kinds

    PARAMETER = "parameter"
    """offset in the parameter buffer, size: these bytes, as an unsigned number."""
    INDEXED = "indexed"
    """term of the offset, size: the same where the offset is computed."""
    DIMENSION = "dimension"
    """``ntid.x`` to ``nctaid.z``: the same for all threads of a launch."""
    THREAD = "thread"
    """``tid.x`` to ``ctaid.z``, ``laneid``: different for each."""
    SIGNED = "signed"
    """width, term: the number that its lowest bits are in two's complement."""
    UNSIGNED = "unsigned"
    """width, term: its lowest bits."""
    QUOTIENT = "quotient"
    """term, divisor: the greatest integer not above their quotient."""
    REMAINDER = "remainder"
    """term, power of two: the lowest bits."""
    COMMON = "common"
    """two words: the bits that both have."""
    CHOICE = "choice"
    """key, terms: one of these; equal keys choose alike."""
    EXTREME = "extreme"
    """``min`` or ``max``, terms."""
    LOOP = "loop"
    """header, register, width: what the register holds when an iteration begins."""
    UNKNOWN = "unknown"
    """place, register, width, why: any value."""


class Atom:
    """One unknown of a term. ``born`` are the blocks that give it a new value each time they run
    (see :func:`carried_by`); ``range`` is what holds for every launch.
    """

    __slots__ = ("args", "born", "depth", "kind", "number", "range", "wide")

    def __init__(self, kind: Kind, args: tuple[Any, ...], born: frozenset[int], within: Range):
        self.kind = kind
        self.args = args
        self.born = born
        self.range = within
        self.number = next(_numbers)
        inner = list(terms_in(args))
        self.depth = 1 + max((term.depth for term in inner), default=0)
        self.wide = self._is_wide(inner)
        if self.depth > MAX_DEPTH:
            raise TooLarge

    def _is_wide(self, inner: list["Term"]) -> bool:
        """Return whether another atom may have the same lowest 32 bits."""
        if self.kind is Kind.CHOICE:
            half = 1 << 31
            return any(
                not -half <= factor < half or any(atom.wide for atom in atoms)
                for term in inner
                for atoms, factor in term.parts.items()
            )
        if self.kind in (Kind.SIGNED, Kind.UNSIGNED):
            return bool(self.args[0] >= 32)
        return self.kind is Kind.PARAMETER and bool(self.args[1] == 8)

    def __repr__(self) -> str:
        """Return it without what is inside of terms, which may be long."""
        plain = [arg for arg in self.args if isinstance(arg, str | int)]
        return f"{self.kind.value}{self.number}{plain}"


def terms_in(args: Iterable[Any]) -> Iterator["Term"]:
    """Yield the terms among the arguments of an atom."""
    for arg in args:
        if isinstance(arg, Term):
            yield arg
        elif isinstance(arg, tuple):
            yield from (term for term in arg if isinstance(term, Term))


Monomial: TypeAlias = tuple[Atom, ...]


_GIVEN = frozenset((Kind.PARAMETER, Kind.DIMENSION))
_COMPUTED = frozenset(
    (Kind.SIGNED, Kind.UNSIGNED, Kind.QUOTIENT, Kind.REMAINDER, Kind.COMMON, Kind.EXTREME)
)


def given_by_launch(term: "Term") -> bool:
    """Return whether a launch's parameters and dimensions alone decide a term's value."""
    return all(
        atom.kind in _GIVEN
        or (atom.kind in _COMPUTED and all(map(given_by_launch, terms_in(atom.args))))
        for monomial in term.parts
        for atom in monomial
    )


class Term:
    """A polynomial: the coefficient of each product of atoms, never 0. The empty product has the
    constant.
    """

    __slots__ = ("_born", "_hash", "_low", "_range", "parts")

    def __init__(self, parts: dict[Monomial, int]) -> None:
        if len(parts) > MAX_MONOMIALS:
            raise TooLarge
        self.parts = parts
        self._hash: int | None = None
        self._low: Term | None = None
        self._born: frozenset[int] | None = None
        self._range: Any = self

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.parts.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Term) and self.parts == other.parts)

    def __repr__(self) -> str:
        def monomial(atoms: Monomial, factor: int) -> str:
            return "*".join([str(factor), *map(repr, atoms)])

        return " + ".join(monomial(*part) for part in self.parts.items()) or "0"

    @property
    def constant(self) -> int | None:
        """The number that it is, if it is one."""
        if not self.parts:
            return 0
        return self.parts.get(()) if len(self.parts) == 1 else None

    @property
    def atom(self) -> Atom | None:
        """The atom that it is, if it is one."""
        if len(self.parts) == 1:
            ((atoms, factor),) = self.parts.items()
            if factor == 1 and len(atoms) == 1:
                return atoms[0]
        return None

    def without_constant(self) -> tuple["Term", int]:
        """Return the rest of the sum, and its constant."""
        rest = {atoms: factor for atoms, factor in self.parts.items() if atoms}
        return Term(rest), self.parts.get((), 0)

    @property
    def depth(self) -> int:
        """How deep atoms are nested."""
        return max((atom.depth for atoms in self.parts for atom in atoms), default=0)

    @property
    def born(self) -> frozenset[int]:
        """The blocks that change it when they run."""
        if self._born is None:
            every = frozenset[int]()
            self._born = every.union(*(atom.born for atoms in self.parts for atom in atoms))
        return self._born


def number(value: int) -> Term:
    """Return a constant."""
    return Term({(): value}) if value else ZERO


ZERO = Term({})
ONE = Term({(): 1})


def total(*terms: Term) -> Term:
    """Return the sum."""
    parts = dict(terms[0].parts)
    for term in terms[1:]:
        for atoms, factor in term.parts.items():
            new = parts.get(atoms, 0) + factor
            if new:
                parts[atoms] = new
            else:
                del parts[atoms]
    return Term(parts)


def scaled(term: Term, factor: int) -> Term:
    """Return the term times a number."""
    if factor == 1:
        return term
    return Term({atoms: old * factor for atoms, old in term.parts.items()}) if factor else ZERO


def difference(one: Term, other: Term) -> Term:
    """Return one minus the other."""
    return total(one, scaled(other, -1))


def product(one: Term, other: Term) -> Term:
    """Return the product."""
    for left, right in ((one, other), (other, one)):
        if (constant := right.constant) is not None:
            return scaled(left, constant)
    if len(one.parts) * len(other.parts) > 4 * MAX_MONOMIALS:
        raise TooLarge
    parts: dict[Monomial, int] = {}
    for left_atoms, left_factor in one.parts.items():
        for right_atoms, right_factor in other.parts.items():
            atoms = tuple(sorted(left_atoms + right_atoms, key=lambda atom: atom.number))
            parts[atoms] = parts.get(atoms, 0) + left_factor * right_factor
    return Term({atoms: factor for atoms, factor in parts.items() if factor})


def smallest(value: int, size: int) -> int:
    """Return the number closest to 0 that is the same modulo ``size``, a power of two."""
    return (value + size // 2) % size - size // 2


def modulo(term: Term, width: int) -> Term:
    """Return the term with the smallest coefficients that are the same modulo 2^width."""
    size = 1 << width
    half = size // 2
    if all(-half <= factor < half for factor in term.parts.values()):
        return term
    parts = {atoms: smallest(factor, size) for atoms, factor in term.parts.items()}
    return Term({atoms: factor for atoms, factor in parts.items() if factor})


def range_of(term: Term) -> Range:
    """Return what holds for every launch."""
    if term._range is term:
        term._range = _range_of(term)
    found: Range = term._range
    return found


def _range_of(term: Term) -> Range:
    low = high = 0
    for atoms, factor in term.parts.items():
        least = greatest = factor
        for atom in atoms:
            if atom.range is None:
                return None
            ends = [end * other for end in (least, greatest) for other in atom.range]
            least, greatest = min(ends), max(ends)
        low, high = low + least, high + greatest
    return low, high


def hull(ranges: Iterable[Range]) -> Range:
    """Return the smallest range that has all of these."""
    found: tuple[int, int] | None = None
    for one in ranges:
        if one is None:
            return None
        found = one if found is None else (min(found[0], one[0]), max(found[1], one[1]))
    return found


def carried_by(header: int) -> int:
    """Return what stands for a loop's atoms among the blocks that give values."""
    return ~header


GREATEST = {
    **dict.fromkeys(("ntid.x", "ntid.y", "tid.x", "tid.y"), 1024),
    **dict.fromkeys(("ntid.z", "tid.z"), 64),
    **dict.fromkeys(("nctaid.x", "ctaid.x"), 0x7FFFFFFF),
    **dict.fromkeys(("nctaid.y", "nctaid.z", "ctaid.y", "ctaid.z"), 0xFFFF),
    "laneid": 32,
}
"""What the sizes of blocks and grids are at most, since CUDA 3.0."""
