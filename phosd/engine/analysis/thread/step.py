"""One instruction as it is followed: what its operands hold, and what its results will."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from phosd.engine.analysis.code.cubin import Kernel
from phosd.engine.analysis.code.operands import (
    Constant,
    Immediate,
    Operand,
    Predicate,
    Register,
    registers_from,
)
from phosd.engine.analysis.values.atoms import Atoms
from phosd.engine.analysis.values.conditions import (
    Condition,
    Facts,
    Opaque,
    Table,
    alternative,
    negated,
    simplified,
)
from phosd.engine.analysis.values.terms import (
    ZERO,
    Kind,
    Range,
    Term,
    modulo,
    number,
    scaled,
    total,
)
from phosd.engine.analysis.values.words import High, Joined, Word, Words

State: TypeAlias = dict[str, Any]
"""What registers (:data:`~.words.Word`) and predicates (:data:`~.conditions.Condition`) hold."""

_DIMENSIONS = ("ntid.x", "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z")
"""At the beginning of constant bank 0, 4 bytes each, from Turing to Hopper."""


PARAMETERS_AT = ("constant", (0, 0x198))
"""Where in constant bank 0 the address of the parameters is, and the place of what is there, where
these begin at ``_HOPPER_BASE``.
"""
_HOPPER_BASE = 0x210
UNINITIALISED_AT = "start"
"""The place of what registers hold that were never written."""


class NotModelled(Exception):
    """The results of an instruction in this form may be anything."""


@dataclass
class Values:
    """Where the values of one kernel come from. ``block`` is the one that is being followed."""

    kernel: Kernel
    atoms: Atoms
    words: Words
    block: int = 0
    _lost: Iterator[int] = field(default_factory=count)

    def constant(self, place: object, width: int, why: str) -> list[Word]:
        """Return words that may hold anything, the same for all threads of a launch."""
        return self._unknown(("constant", place), width, why, None, None)

    def unknown(self, place: object, width: int, why: str, within: Range = None) -> list[Word]:
        """Return words that may hold anything, two of them one number."""
        return self._unknown(place, width, why, within, self.block)

    def uninitialised(self, register: str) -> Term:
        """Return what a register holds that was never written."""
        return self.atoms.unknown(UNINITIALISED_AT, register, None, "uninitialised", 32)

    def lost(self, width: int) -> Term:
        """Return a word, or the number of two, that would take too much to describe."""
        return self.atoms.unknown(("lost", next(self._lost)), 0, self.block, "too large", width)

    def _unknown(
        self, place: object, width: int, why: str, within: Range, block: int | None
    ) -> list[Word]:
        words: list[Word] = []
        while width > 0:
            part = 64 if width >= 64 else 32
            term = self.atoms.unknown(place, len(words), block, why, part, within)
            words += [term, High(term)] if part == 64 else [term]
            width -= part
        return words

    def split(self, term: Term, size: int) -> list[Word]:
        """Return the words of a number of at most 8 bytes."""
        low = self.atoms.low(term)
        return [low] if size <= 4 else [low, self.words.high(term)]


@dataclass
class Step:
    """An instruction at ``at``, in a state that is not changed, for threads for which ``facts``
    hold; ``given`` is the instruction's own guard. With ``coarse``, registers that take much to
    describe may hold anything.
    """

    values: Values
    at: int
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    state: State
    facts: Facts
    given: Condition
    coarse: bool = False

    # What operands hold.

    def condition(self, operand: Operand) -> Condition:
        """Return the condition that a predicate holds, as it is written."""
        if not isinstance(operand, Predicate):
            raise NotModelled
        return held_condition(self.state, operand, self.facts)

    def word(self, operand: Operand) -> Word:
        """Return the word that an operand is, as it is written but for ``~``."""
        match operand:
            case Register("", plain=True):
                return ZERO
            case Register(name, minus, _, True):
                held = self.held(name)
            case Constant(plain=True, minus=minus):
                held = self.constant(operand, 4)[0]
            case Immediate(value):
                return number(value)
            case _:
                raise NotModelled
        if not minus:
            return held
        return modulo(scaled(self.values.words.term(held), -1), 32)

    def term(self, operand: Operand) -> Term:
        """Return the term of an operand's word, as it is written."""
        term = self.values.words.term(self.word(operand))
        return total(scaled(term, -1), number(-1)) if is_inverted(operand) else term

    def wide(self, operand: Operand) -> Term:
        """Return the 64-bit number whose lower half the operand is."""
        match operand:
            case Register("", plain=True):
                return ZERO
            case Register(name, False, False, True):
                low, high = registers_from(name, 2)
                return self.values.words.pair(self.held(low), self.held(high))
            case Immediate(value):
                return number(value)
            case Constant(plain=True, minus=False):
                low_word, high_word = self.constant(operand, 8)
                return self.values.words.pair(low_word, high_word)
        raise NotModelled

    def is_zero(self, operand: Operand) -> bool:
        """Return whether the operand is known to be 0."""
        word = self.word(operand)
        return not is_inverted(operand) and isinstance(word, Term) and not word.parts

    def held(self, name: str) -> Word:
        """Return the word in a register."""
        word: Word | None = self.state.get(name)
        if word is None:
            return self.values.uninitialised(name)
        word = chosen_word(word, self.facts) if self.facts else word
        return self.values.lost(32) if self.coarse and self.values.words.is_long(word) else word

    def constant(self, operand: Constant, size: int) -> list[Word]:
        """Return the words of ``size`` bytes of constant memory."""
        values, kernel = self.values, self.values.kernel
        if not operand.plain:
            raise NotModelled
        if operand.register:
            by = values.words.term(self.held(operand.register)).constant
            if by is not None:
                operand = Constant(operand.bank, operand.offset + by)
        if operand.bank != 0:
            why = "global variable" if operand.bank == 4 else "constant memory"
            if operand.register:
                return values.unknown(self.at, 8 * size, why)
            return values.constant((operand.bank, operand.offset), 8 * size, why)
        offset = operand.offset - kernel.base
        if operand.register:
            within = values.atoms.signed(32, values.words.term(self.held(operand.register)))
            if size > 8:
                return values.unknown(("bank", self.at), 8 * size, "indexed parameter")
            term = values.atoms.indexed(total(within, number(offset)), size)
            return values.split(term, size)
        if offset >= 0 and offset + size <= kernel.size:
            if size <= 8:
                return values.split(values.atoms.parameter(offset, size), size)
            return [
                word
                for at in range(offset, offset + size, 8)
                for word in values.split(values.atoms.parameter(at, 8), 8)
            ]
        if kernel.base == _HOPPER_BASE and size == 8 and operand.offset == PARAMETERS_AT[1][1]:
            return values.constant(PARAMETERS_AT[1], 64, "address of parameters")
        found: list[Word] = []
        for at in range(operand.offset, operand.offset + size, 4):
            if size >= 4 and at % 4 == 0 and at < 4 * len(_DIMENSIONS):
                found.append(values.atoms.dimension(_DIMENSIONS[at // 4]))
            else:
                found += values.constant((0, at, min(size, 4)), 32, "constant memory")
        return found

    # What results will hold.

    def result(self, operand: Operand, *words: Word) -> State:
        """Return a state in which a register and those behind it hold these words."""
        if not isinstance(operand, Register):
            raise NotModelled
        if not operand.name:
            return {}
        low = (self.values.atoms.low(word) if isinstance(word, Term) else word for word in words)
        return dict(zip(registers_from(operand.name, len(words)), low, strict=True))

    def conditions(self, operands: Sequence[Operand], held: Sequence[Condition]) -> State:
        """Return a state in which these predicates hold these conditions."""
        return {
            operand.name: condition
            for operand, condition in zip(operands, held, strict=True)
            if isinstance(operand, Predicate) and operand.name
        }

    def opaque(self, operands: Sequence[Operand]) -> State:
        """Return a state in which these predicates hold anything."""
        held = [Opaque((self.at, getattr(operand, "name", ""))) for operand in operands]
        return self.conditions(operands, held)


def is_inverted(operand: Operand) -> bool:
    """Return whether ``~`` is written before the operand."""
    return isinstance(operand, Register) and operand.inverted


def held_condition(state: State, operand: Predicate, facts: Facts) -> Condition:
    """Return what a predicate holds, as it is written."""
    if not operand.name:
        return not operand.inverted
    held: Condition = state.get(operand.name, Opaque(("start", operand.name)))
    while isinstance(held, Table) and (simpler := simplified(held, facts)) != held:
        held = simpler
    return negated(held) if operand.inverted else held


def chosen_word(word: Word, facts: Facts) -> Word:
    """Return which word a choice is, if what holds decides that."""
    while True:
        if isinstance(word, Joined):
            key: tuple[Any, ...] = word.key
            words: tuple[Word, ...] = word.words
        elif isinstance(word, Term) and (atom := word.atom) and atom.kind is Kind.CHOICE:
            key, words = atom.args
        else:
            return word
        place = alternative(key, facts)
        if place is None:
            return word
        word = words[place]
