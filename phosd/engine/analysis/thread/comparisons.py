"""What comparisons, and functions of predicates, leave in predicates."""

from phosd.engine.analysis.code.operands import Immediate
from phosd.engine.analysis.thread.step import NotModelled, State, Step, is_inverted
from phosd.engine.analysis.values.conditions import COMPARISONS, Compare, Condition, table
from phosd.engine.analysis.values.terms import Term

_COMBINED = {"AND": (0x88, 0x22), "OR": (0xEE, 0xBB), "XOR": (0x66, 0x99)}
"""Tables for a comparison, true or negated, as b, and the other condition as c."""


def compared(how: str, signed: bool, one: Term, other: Term, width: int = 32) -> Condition:
    """Return what it is to compare two words."""
    if one.constant is not None and other.constant is not None:
        left, right = one.constant % (1 << width), other.constant % (1 << width)
        if signed:
            half = 1 << (width - 1)
            left, right = (left ^ half), (right ^ half)
        return {
            "LT": left < right,
            "LE": left <= right,
            "GT": left > right,
            "GE": left >= right,
            "EQ": left == right,
            "NE": left != right,
        }[how]
    return Compare(how, signed, width, one, other)


def set_predicate(step: Step) -> State:
    """ISETP: two words compared, and another condition; EX: the upper halves of two numbers."""
    first, second, one, other, *given = step.operands
    how, *rest = step.modifiers
    if how not in COMPARISONS or is_inverted(one) or is_inverted(other):
        raise NotModelled
    words, atoms = step.values.words, step.values.atoms
    signed = "U32" not in rest
    if "EX" in rest:  # the upper halves; what the lower halves gave comes last
        *given, lower = given
        below = step.condition(lower)
        if not isinstance(below, Compare) or below.width != 32:
            raise NotModelled
        if below.how != how or (below.signed and how not in ("EQ", "NE")):
            raise NotModelled
        left = words.pair(below.one, step.word(one))
        right = words.pair(below.other, step.word(other))
        outcome = compared(below.how, signed, left, right, 64)
    else:
        left, right = atoms.low(step.term(one)), atoms.low(step.term(other))
        outcome = compared(how, signed, left, right)
    also = step.condition(given[0]) if given else True
    bits = next((_COMBINED[word] for word in rest if word in _COMBINED), _COMBINED["AND"])
    held = [table(each, True, outcome, also) for each in bits]
    return step.conditions([first, second], held)


def combine_predicates(step: Step) -> State:
    """PLOP3: two functions of three conditions."""
    first, second, *rest = step.operands
    inputs, numbers = rest[:3], rest[3:]
    held = []
    for operand in numbers:
        if not isinstance(operand, Immediate):
            raise NotModelled
        one, two, three = map(step.condition, inputs)
        held.append(table(operand.value & 0xFF, one, two, three))
    return step.conditions([first, second], held)
