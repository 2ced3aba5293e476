"""What integer arithmetic leaves in its results."""

from collections.abc import Sequence

from phosd.engine.analysis.code.operands import Immediate, Operand, Predicate
from phosd.engine.analysis.thread.comparisons import compared
from phosd.engine.analysis.thread.step import NotModelled, State, Step, is_inverted
from phosd.engine.analysis.values import arithmetic
from phosd.engine.analysis.values.conditions import Carry, Condition
from phosd.engine.analysis.values.logic import function
from phosd.engine.analysis.values.terms import ZERO, Term, modulo, number, product, scaled, total
from phosd.engine.analysis.values.words import Word


def _divide(operands: Sequence[Operand]) -> tuple[Operand, list[Operand], list[Operand]]:
    """Return the register for the result, the predicates behind it, and the rest."""
    destination, *rest = operands
    count = 0
    while count < len(rest) and isinstance(rest[count], Predicate):
        count += 1
    return destination, rest[:count], rest[count:]


def add(step: Step) -> State:
    """IADD3: a sum of three, with the carries out of it, or into it; of 64 bits."""
    destination, carries, rest = _divide(step.operands)
    added, into = rest[:3], rest[3:]
    if "64" in step.modifiers:
        if carries or into or "X" in step.modifiers:
            raise NotModelled
        whole = modulo(total(ZERO, *map(step.wide, added)), 64)
        return step.result(destination, whole, step.values.words.high(whole))
    if "X" in step.modifiers:
        highs = [(is_inverted(operand), step.word(operand)) for operand in added]
        return step.result(destination, _upper_sum(step, highs, into)) | step.opaque(carries)
    if into or any(map(is_inverted, added)):
        raise NotModelled
    atoms, words = step.values.atoms, step.values.words
    solid = [operand for operand in added if not step.is_zero(operand)]
    result = step.word(solid[0]) if len(solid) == 1 else total(ZERO, *map(step.term, solid))
    if not carries:
        return step.result(destination, result)
    plus, minus = [], []
    for operand in solid:
        term = atoms.low(words.term(step.word(operand)))
        if getattr(operand, "minus", False):
            minus.append(modulo(scaled(term, -1), 32))
        else:
            plus.append(term)
    held = [arithmetic.carry(plus, minus, ordinal) for ordinal in range(len(carries))]
    return step.result(destination, result) | step.conditions(carries, held)


def _upper_sum(step: Step, highs: Sequence[arithmetic.Signed], into: Sequence[Operand]) -> Word:
    """Return a sum of words, some of them inverted, and of carries."""
    carries = [step.condition(operand) for operand in into]
    whole = arithmetic.add_with_carry(step.values.words, highs, carries)
    if whole is not None:
        return whole
    if not all(isinstance(carry, bool) for carry in carries):
        raise NotModelled
    solid = [(inverted, word) for inverted, word in highs if inverted or word != ZERO]
    if len(solid) == 1 and not solid[0][0] and not any(carries):
        return solid[0][1]
    terms = [number(sum(map(bool, carries)))]
    for inverted, word in solid:
        term = step.values.words.term(word)
        terms.append(total(scaled(term, -1), number(-1)) if inverted else term)
    return total(*terms)


def add_two(step: Step) -> State:
    """VIADD: a sum of two."""
    destination, one, other = step.operands
    return step.result(destination, total(step.term(one), step.term(other)))


def multiply(step: Step) -> State:
    """IMAD: a product and a sum; WIDE has 64 bits, HI their upper half, X adds a carry."""
    destination, carries, (first, second, third, *into) = _divide(step.operands)
    lost = step.opaque(carries)
    atoms, words = step.values.atoms, step.values.words
    if "X" in step.modifiers:
        highs = [(is_inverted(third), step.word(third))]
        if not step.is_zero(first) and not step.is_zero(second):
            if step.term(second).constant == 1:
                highs.append((is_inverted(first), step.word(first)))
            else:
                highs.append((False, product(step.term(first), step.term(second))))
        return lost | step.result(destination, _upper_sum(step, highs, into))
    if into:
        raise NotModelled
    if "WIDE" in step.modifiers or "HI" in step.modifiers:
        extend = atoms.unsigned if "U32" in step.modifiers else atoms.signed
        one, other = (extend(32, step.term(operand)) for operand in (first, second))
        whole = modulo(total(product(one, other), step.wide(third)), 64)
        if "HI" in step.modifiers:
            return lost | step.result(destination, words.high(whole))
        return lost | step.result(destination, atoms.low(whole), words.high(whole))
    if step.is_zero(first) or step.is_zero(second):
        return lost | step.result(
            destination, step.term(third) if is_inverted(third) else step.word(third)
        )
    if step.is_zero(third) and step.term(second).constant == 1 and not is_inverted(first):
        return lost | step.result(destination, step.word(first))
    whole = total(product(step.term(first), step.term(second)), step.term(third))
    return lost | step.result(destination, whole)


def shift_and_add(step: Step) -> State:
    """LEA: adds one number, shifted, to another; with HI to the upper half of a sum."""
    destination, carries, rest = _divide(step.operands)
    atoms, words, modifiers = step.values.atoms, step.values.words, step.modifiers
    into = [operand for operand in rest if isinstance(operand, Predicate)]
    low, base, *more = (operand for operand in rest if not isinstance(operand, Predicate))
    by = more[-1]
    if not isinstance(by, Immediate) or len(into) > 1:
        raise NotModelled
    factor = 1 << (by.value & 31)
    if "HI" not in modifiers:
        one, other = atoms.low(scaled(step.term(low), factor)), atoms.low(step.term(base))
        if into:
            raise NotModelled
        state = step.result(destination, total(one, other))
        if len(carries) != 1 or any(getattr(each, "minus", False) for each in (low, base)):
            return state | step.opaque(carries)
        return state | step.conditions(carries, [arithmetic.carry([one, other], [], 0)])
    if "SX32" in modifiers:
        shifted = atoms.signed(32, step.term(low))
        if factor == 2 and into and _adds(step.condition(into[0]), atoms.low(shifted)):
            factor = 1  # nothing was shifted; that the upper half is the sign, is the same for both
    elif len(more) == 2:
        if is_inverted(more[0]) or getattr(low, "minus", False):
            raise NotModelled
        shifted = words.pair(step.word(low), step.word(more[0]))
    else:
        raise NotModelled
    shifted = modulo(scaled(shifted, factor), 64)
    if "X" not in modifiers:
        if into:
            raise NotModelled
        sum_of_words = total(words.term(words.high(shifted)), step.term(base))
        return step.result(destination, sum_of_words) | step.opaque(carries)
    carry = step.condition(into[0]) if into else False
    upper = arithmetic.add_shifted(words, shifted, step.word(base), carry)
    if upper is None or is_inverted(base):
        raise NotModelled
    return step.result(destination, upper) | step.opaque(carries)


def _adds(carry: Condition, term: Term) -> bool:
    return isinstance(carry, Carry) and term in carry.plus


def shift(step: Step) -> State:
    """SHF: two words, shifted."""
    destination, low, by, high = step.operands
    distance = step.term(by).constant
    if distance is None or is_inverted(low) or is_inverted(high):
        raise NotModelled
    words = step.values.words
    word = arithmetic.shift(
        words, step.modifiers, step.word(low), distance % (1 << 32), step.word(high)
    )
    if word is None:
        raise NotModelled
    return step.result(destination, word)


def extend(step: Step) -> State:
    """SGXT: a number of so many bits, which its sign extends; with U32, zeros do."""
    destination, operand, width = step.operands
    bits = step.term(width).constant
    if bits is None or not 0 < bits < 32 or is_inverted(operand):
        raise NotModelled
    atoms, term = step.values.atoms, step.term(operand)
    if "U32" in step.modifiers:
        return step.result(destination, atoms.remainder(term, 1 << bits))
    return step.result(destination, atoms.signed(bits, term))


def logic(step: Step) -> State:
    """LOP3: a function of the bits of three words."""
    operands = list(step.operands)
    tested = [operands.pop(0)] if isinstance(operands[0], Predicate) else []
    destination, *three, bits, _ = operands
    if not isinstance(bits, Immediate):
        raise NotModelled
    if len(three) != 3:
        raise NotModelled
    atoms = step.values.atoms
    term = function(atoms, bits.value & 0xFF, list(map(step.term, three)))
    state = step.result(destination, term)
    low = atoms.low(term)
    return state | step.conditions(tested, [compared("NE", False, low, ZERO)] * len(tested))


def permute(step: Step) -> State:
    """PRMT: four bytes of two words, each in any place, or its sign in all bits of one."""
    destination, one, selector, other = step.operands
    chosen = step.term(selector).constant
    if chosen is None:
        raise NotModelled
    nibbles = [chosen >> 4 * place & 0xF for place in range(4)]
    atoms, words = step.values.atoms, (step.term(one), step.term(other))
    # Bytes in a row are part of one number, which its sign may extend.
    length = next((at for at in range(1, 4) if nibbles[at] != nibbles[0] + at), 4)
    if nibbles[0] in (0, 4) and length < 4 and set(nibbles[length:]) == {nibbles[length - 1] | 8}:
        return step.result(destination, atoms.signed(8 * length, words[nibbles[0] // 4]))
    if any(nibble & 8 for nibble in nibbles):
        raise NotModelled
    result, at = ZERO, 0
    while at < 4:
        source, first = divmod(nibbles[at], 4)
        count = 1
        while at + count < 4 and first + count < 4 and nibbles[at + count] == nibbles[at] + count:
            count += 1
        part = words[source]
        if first + count < 4:
            part = atoms.remainder(part, 1 << 8 * (first + count))
        part = atoms.quotient(atoms.unsigned(32, part), 1 << 8 * first)
        result = total(result, scaled(part, 1 << 8 * at))
        at += count
    return step.result(destination, result)


def extreme(step: Step) -> State:
    """IMNMX: the smaller of two, or the greater."""
    destination, one, other, least = step.operands
    atoms = step.values.atoms
    if not isinstance(least, Predicate) or least.name:
        raise NotModelled
    extend = atoms.unsigned if "U32" in step.modifiers else atoms.signed
    terms = tuple(extend(32, step.term(operand)) for operand in (one, other))
    return step.result(destination, atoms.extreme("max" if least.inverted else "min", terms))


def absolute(step: Step) -> State:
    """IABS: the absolute value."""
    destination, operand = step.operands
    term = step.values.atoms.signed(32, step.term(operand))
    return step.result(destination, step.values.atoms.extreme("max", (term, scaled(term, -1))))
