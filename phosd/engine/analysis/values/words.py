"""What a 32-bit register holds, and what two of them are together.

A *word* is a :class:`~.terms.Term`, of which the register holds the lowest 32 bits, or
:class:`High`, bits 32 to 63 of one, or :class:`Joined`, one of several words. Compilers compute
with 64-bit numbers in two registers, and any two may belong together: :meth:`Words.pair` finds the
number again. What it returns is right for any two words; it is simple where they belong together.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from phosd.engine.analysis.values.atoms import Atoms
from phosd.engine.analysis.values.terms import (
    MAX_DEPTH,
    Atom,
    Kind,
    Term,
    TooLarge,
    difference,
    modulo,
    number,
    product,
    scaled,
    total,
)

WIDE = 1 << 32
_LONG = 8
"""Parts of a term: the product of two such is within :data:`~.terms.MAX_MONOMIALS`."""


@dataclass(frozen=True)
class High:
    """Bits 32 to 63 of a term."""

    term: Term


@dataclass(frozen=True, eq=False)
class Joined:
    """One of the words; ``key`` and ``born`` as those of a choice (``terms``). There is one object
    for each key and words.
    """

    key: tuple[Any, ...]
    words: tuple["Word", ...]
    born: frozenset[int]
    depth: int


Word: TypeAlias = Term | High | Joined


ELSEWHERE = "elsewhere"
"""Key of a choice with one alternative: what it is for another thread of the warp."""


class Words:
    """Operations on words. ``paired`` has the registers of loops that were found to belong
    together.
    """

    def __init__(self, atoms: Atoms) -> None:
        self.atoms = atoms
        self.paired: set[tuple[int, Any, Any]] = set()
        # Words are nested in one another many times over: each is looked at once.
        self._joined: dict[tuple[Any, ...], Joined] = {}
        self._terms: dict[Joined, Term] = {}
        self._pairs: dict[tuple[Term, Word], Term] = {}

    def high(self, term: Term) -> Word:
        """Return bits 32 to 63 of a term, in the form that a register has from elsewhere."""
        term = modulo(term, 64)
        constant = term.constant
        if constant is not None:
            return modulo(number(constant >> 32), 32)
        atom = term.atom
        if atom and atom.kind is Kind.PARAMETER and atom.args[1] == 8:
            return self.atoms.parameter(atom.args[0] + 4, 4)
        if atom and atom.kind is Kind.UNSIGNED and atom.args[0] == 32:
            return number(0)
        return High(term)

    def term(self, word: Word) -> Term:
        """Return a term that is equal to the word modulo 2^32."""
        if isinstance(word, Term):
            return word
        if isinstance(word, High):
            return self.atoms.quotient(word.term, WIDE)
        term = self._terms.get(word)
        if term is None:
            term = self.atoms.choice(word.key, tuple(map(self.term, word.words)), word.born)
            self._terms[word] = term
        return term

    def depth(self, word: Word) -> int:
        """Return how deep atoms are nested in a word."""
        return word.term.depth if isinstance(word, High) else word.depth

    def is_long(self, word: Word) -> bool:
        """Return whether a word takes much to describe."""
        term = word.term if isinstance(word, High) else word
        long = isinstance(term, Term) and len(term.parts) > _LONG
        return long or self.depth(word) > MAX_DEPTH // 2

    def choice(self, key: tuple[Any, ...], words: tuple[Word, ...], born: frozenset[int]) -> Word:
        """Return one of the words."""
        if key[0] != ELSEWHERE and all(word == words[0] for word in words):
            return words[0]
        terms = tuple(word for word in words if isinstance(word, Term))
        if len(terms) == len(words):
            return self.atoms.choice(key, terms, born)
        joined = self._joined.get((key, words))
        if joined is None:
            depth = 1 + max(map(self.depth, words))
            if depth > MAX_DEPTH:
                raise TooLarge
            joined = self._joined[key, words] = Joined(key, words, born, depth)
        return joined

    def pair(self, low: Word, high: Word) -> Term:
        """Return the 64-bit number of two registers."""
        low = self.term(low)
        whole = self._pairs.get((low, high))
        if whole is None:
            whole = self._pairs[low, high] = self._pair(low, high)
        return whole

    def _pair(self, low: Term, high: Word) -> Term:
        if isinstance(high, High):
            whole = self._of_high(low, high.term)
            if whole is not None:
                return whole
        if isinstance(high, Joined):
            lows = self._chosen(low, high.key, len(high.words)) or (low,) * len(high.words)
            terms = tuple(
                self.pair(one, other) for one, other in zip(lows, high.words, strict=True)
            )
            return self.atoms.choice(high.key, terms, high.born)
        if isinstance(high, Term) and (whole := self._of_terms(low, high)) is not None:
            return whole
        return self.whole(total(self.atoms.unsigned(32, low), scaled(self.term(high), WIDE)))

    def fits(self, low: Term, high: Word) -> bool:
        """Return whether the two words are known to be parts of one number."""
        if isinstance(high, High):
            return self._of_high(low, high.term) is not None
        if isinstance(high, Joined):
            return self._chosen(low, high.key, len(high.words)) is not None
        return high.constant is None and self._of_terms(low, high) is not None

    def _chosen(self, low: Term, key: tuple[Any, ...], count: int) -> tuple[Term, ...] | None:
        atom = low.atom
        if atom and atom.kind is Kind.CHOICE and atom.args[0] == key:
            terms: tuple[Term, ...] = atom.args[1]
            return terms if len(terms) == count else None
        return None

    def _of_high(self, low: Term, whole: Term) -> Term | None:
        lowest = self.atoms.low(whole)
        if lowest == low:
            return whole
        # A pointer of which some bits were cleared, to round it down: no others have changed.
        cut = modulo(difference(lowest, low), 32)
        return difference(whole, cut) if self._is_bits_of(lowest, cut) else None

    def _is_bits_of(self, word: Term, cut: Term) -> bool:
        """Return whether a term is a run of bits of a word, as it is in its place."""
        for monomial, factor in cut.parts.items():
            if factor != 1 or len(monomial) != 1 or monomial[0].kind is not Kind.REMAINDER:
                continue
            power = monomial[0].args[1]
            upper = self.atoms.remainder(word, power)
            begins = (1 << bit for bit in range(power.bit_length() - 1))
            if any(cut == difference(upper, self.atoms.remainder(word, one)) for one in begins):
                return True
        return False

    def _of_terms(self, low: Term, high: Term) -> Term | None:
        constant = high.constant
        if constant is not None:
            upper = constant % WIDE
            if (lowest := low.constant) is not None:
                value = lowest % WIDE + (upper << 32)
                return number(value - (1 << 64) if value >> 63 else value)
            if upper == 0:
                return self.atoms.unsigned(32, low)
            return None
        one, other = low.atom, high.atom
        if one is None or other is None or one.kind is not other.kind:
            return self._of_product(low, high)
        if one.kind is Kind.PARAMETER and one.args[1] == other.args[1] == 4:
            if other.args[0] == one.args[0] + 4:
                return self.atoms.parameter(one.args[0], 8)
        elif one.kind is Kind.CHOICE and one.args[0] == other.args[0]:
            return self._of_choices(one, other)
        elif one.kind is Kind.LOOP and one.args[0] == other.args[0]:
            self.paired.add((one.args[0], one.args[1], other.args[1]))
        return None

    def _of_product(self, low: Term, high: Term) -> Term | None:
        """Return a number whose upper half was computed as the upper half of another, with the same
        lower half, and a sum: as products of 64-bit numbers are.
        """
        for monomial in high.parts:
            atom = monomial[0] if len(monomial) == 1 else None
            if not atom or atom.kind is not Kind.QUOTIENT or high.parts[monomial] != 1:
                continue
            inner, divisor = atom.args
            if divisor == WIDE and self.atoms.low(inner) == low:
                rest = difference(high, Term({monomial: 1}))
                return self.whole(total(inner, scaled(rest, WIDE)))
        return None

    def whole(self, term: Term) -> Term:
        """Return a 64-bit number in which lower and upper halves of numbers, each in a product of
        its own, have become those numbers.
        """
        upper = {m: f // WIDE for m, f in term.parts.items() if f % WIDE == 0}
        if not upper:
            return term
        for atom in dict.fromkeys(one for monomial in upper for one in monomial):
            number_ = self._with_upper_half(atom)
            lower = None if number_ is None else self.atoms.unsigned(32, number_).atom
            if number_ is not None and lower and any(lower in m for m in term.parts):
                instead = difference(number_, scaled(Term({(atom,): 1}), WIDE))
                term = self._replaced(term, lower, instead)
        upper = {m: f // WIDE for m, f in term.parts.items() if f % WIDE == 0}
        rest = {m: f for m, f in term.parts.items() if f % WIDE}
        return modulo(total(Term(rest), scaled(self.atoms.low(Term(upper)), WIDE)), 64)

    def _with_upper_half(self, atom: Atom) -> Term | None:
        """Return the number whose upper half an atom is."""
        if atom.kind is Kind.QUOTIENT:
            inner, divisor = atom.args
            if divisor >= WIDE and divisor % WIDE == 0:
                return self.atoms.quotient(inner, divisor // WIDE)
            if WIDE % divisor == 0:
                return scaled(inner, WIDE // divisor)
        if atom.kind is Kind.PARAMETER and atom.args[1] == 4 and atom.args[0] >= 4:
            return self.atoms.parameter(atom.args[0] - 4, 8)
        return None

    def _replaced(self, term: Term, atom: Atom, instead: Term) -> Term:
        kept = Term({m: f for m, f in term.parts.items() if atom not in m})
        for monomial, factor in term.parts.items():
            if atom not in monomial:
                continue
            part = number(factor)
            for one in monomial:
                part = product(part, instead if one is atom else Term({(one,): 1}))
            kept = total(kept, part)
        return kept

    def _of_choices(self, low: Atom, high: Atom) -> Term:
        key, lows = low.args
        terms = tuple(map(self.pair, lows, high.args[1]))
        return self.atoms.choice(key, terms, low.born | high.born)
