"""What moves, loads of constants and selections leave in their results."""

from phosd.engine.analysis.code.operands import (
    Constant,
    Immediate,
    Other,
    Real,
    Register,
    half_bits,
)
from phosd.engine.analysis.thread.step import (
    NotModelled,
    State,
    Step,
    Values,
    chosen_word,
    is_inverted,
)
from phosd.engine.analysis.values.conditions import Condition, implied, is_plain, negated
from phosd.engine.analysis.values.terms import ZERO, Atom, Kind, Term, number
from phosd.engine.analysis.values.words import ELSEWHERE, Joined, Word

_SPECIAL = {
    **{f"SR_TID.{axis}": f"tid.{axis.lower()}" for axis in "XYZ"},
    **{f"SR_CTAID.{axis}": f"ctaid.{axis.lower()}" for axis in "XYZ"},
    "SR_LANEID": "laneid",
}
_SHARED_WINDOW = "SR_SWINHI"
"""The upper half of generic addresses of shared memory."""
SHARED_AT = ("constant", _SHARED_WINDOW)
"""The place of what is there."""
_OF_SYMBOL = ("32@lo(", "32@hi(")
"""Halves of an address that the loader writes into the instruction."""
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def move(step: Step) -> State:
    """MOV: a word."""
    operand = step.operands[1]
    if isinstance(operand, Other) and operand.text.startswith(_OF_SYMBOL):
        why = "global variable"
        return step.result(step.operands[0], *step.values.constant(step.at, 32, why))
    return step.result(
        step.operands[0], step.term(operand) if is_inverted(operand) else step.word(operand)
    )


def load_constant(step: Step) -> State:
    """LDC: words of constant memory."""
    destination, source = step.operands
    if not isinstance(source, Constant):
        raise NotModelled
    size = next((_SIZES[m] for m in step.modifiers if m in _SIZES), 4)
    words = step.constant(source, size)
    if any(m in ("S8", "S16") for m in step.modifiers):
        words = [step.values.atoms.signed(8 * size, step.values.words.term(words[0]))]
    return step.result(destination, *words)


def load_special(step: Step) -> State:
    """S2R and CS2R: what a thread knows of itself, or zeros."""
    name = getattr(step.operands[1], "text", "")
    if name == "SRZ":
        return step.result(step.operands[0], *[ZERO] * (1 if "32" in step.modifiers else 2))
    if name == _SHARED_WINDOW:
        return step.result(step.operands[0], *step.values.constant(name, 32, "shared memory"))
    if name not in _SPECIAL:
        raise NotModelled
    return step.result(step.operands[0], step.values.atoms.thread(_SPECIAL[name]))


def to_uniform(step: Step) -> State:
    """R2UR: one thread's word becomes that of all of its warp."""
    destination, source = step.operands
    if is_inverted(source):
        raise NotModelled
    word = step.word(source)
    if not _same_in_block(word):
        block = step.values.block
        key = (ELSEWHERE, block, step.given)
        word = step.values.words.choice(key, (word,), frozenset((block,)))
    return step.result(destination, word)


def _same_in_block(word: Word) -> bool:
    if isinstance(word, Joined):
        return False
    term = word if isinstance(word, Term) else word.term
    return all(_is_same(atom) for atoms in term.parts for atom in atoms)


def _is_same(atom: Atom) -> bool:
    match atom.kind:
        case Kind.PARAMETER | Kind.DIMENSION:
            return True
        case Kind.THREAD:
            return bool(atom.args[0].startswith("ctaid"))
        case Kind.SIGNED | Kind.UNSIGNED:
            return _same_in_block(atom.args[1])
        case Kind.QUOTIENT | Kind.REMAINDER:
            return _same_in_block(atom.args[0])
        case Kind.COMMON:
            return all(map(_same_in_block, atom.args[0]))
        case Kind.UNKNOWN:
            return isinstance(atom.args[0], tuple) and atom.args[0][0] == "constant"
    return False


def half_constant(step: Step) -> State:
    """HFMA2: the compiler loads constants in this way: ``-0 * 0 + (upper, lower)``."""
    destination, one, other, *halves = step.operands
    if (one, other) != (Register("", minus=True), Register("")) or len(halves) != 2:
        raise NotModelled
    bits = []
    for half in halves:
        value = half.value if isinstance(half, Real | Immediate) else None
        bits.append(None if value is None or value != value else half_bits(float(value)))
    upper, lower = bits
    if upper is None or lower is None:
        raise NotModelled
    return step.result(destination, number(upper << 16 | lower))


def select_by_predicate(step: Step) -> State:
    """SEL: one of two words."""
    destination, one, other, given = step.operands
    if is_inverted(one) or is_inverted(other):
        raise NotModelled
    condition = step.condition(given)
    return step.result(
        destination, select(step.values, condition, step.word(one), step.word(other))
    )


def select(values: Values, given: Condition, one: Word, other: Word) -> Word:
    """Return one word where a condition holds, and the other where it does not. Opposite conditions
    give the same choice.
    """
    if isinstance(given, bool):
        return one if given else other
    opposite = negated(given)
    one = chosen_word(one, frozenset(implied(given)))
    other = chosen_word(other, frozenset(implied(opposite)))
    if not is_plain(given):
        given, one, other = opposite, other, one
    return values.words.choice(("if", given), (one, other), frozenset((values.block,)))
