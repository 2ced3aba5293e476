"""Say where in global memory an instruction is, from its operands.

A tensor map (``CUtensorMap``) is 128 bytes that describe a tensor for TMA. Its first 8 are the
tensor's address: that is where ptxas stores what ``tensormap.replace.tile.global_address`` is
given. Kernels have it among their parameters (``__grid_constant__``), and the hardware its address.
"""

from dataclasses import dataclass

from phosd.engine.analysis.code.opcodes import Use, size
from phosd.engine.analysis.code.operands import Address, Register, registers_from
from phosd.engine.analysis.thread.step import Step
from phosd.engine.analysis.values.terms import Term, TooLarge, modulo, number, product, total

_THROUGH_MAP = frozenset(("UTMALDG", "UTMASTG", "UTMAREDG"))
_BULK = frozenset(("UBLKCP", "UBLKRED"))
_BULK_UNIT = 16


@dataclass(frozen=True)
class Place:
    """``size`` bytes at ``address``; with ``through_map``, what the tensor map there describes."""

    address: Term
    size: int
    use: Use
    through_map: bool = False


def place_of(step: Step, name: str, use: Use) -> Place:
    """Return the place that an instruction accesses; an address that may be any if its operands
    have a form that is not known.
    """
    places = [
        operand if isinstance(operand, Address) else None
        for operand in step.operands
        if isinstance(operand, Address) or getattr(operand, "text", "").startswith(("[", "desc"))
    ]
    if name in _THROUGH_MAP:
        return Place(_pair(step, places[1] if len(places) > 1 else None, name), 1, use, True)
    if name in _BULK:
        return _bulk(step, name, places, use)
    where = places[-1] if len(places) == (2 if name == "LDGSTS" else 1) else None
    if where and where.registers and not (where.wide[0] or "E" in step.modifiers):
        where = None
    return Place(_pair(step, where, name), size(name, step.modifiers), use)


def _bulk(step: Step, name: str, places: list[Address | None], use: Use) -> Place:
    """Return the place of a copy from shared memory (S) to global (G), or the other way: the
    destination comes first.
    """
    ways = step.modifiers[:2]
    if ways not in (("S", "G"), ("G", "S")) or len(places) != 2:
        return Place(_pair(step, None, name), _BULK_UNIT, use)
    if name == "UBLKCP":
        use = Use.READ if ways == ("S", "G") else Use.WRITTEN
    address = _pair(step, places[ways.index("G")], name)
    last = step.operands[-1]
    units = step.term(last).constant if isinstance(last, Register) else None
    if units is not None:
        return Place(address, _BULK_UNIT * (units % (1 << 32)), use)
    units_before = step.values.lost(32)
    address = modulo(total(address, product(units_before, number(_BULK_UNIT))), 64)
    return Place(address, _BULK_UNIT, use)


def _pair(step: Step, where: Address | None, name: str) -> Term:
    """Return the number in a pair of registers and an offset, or any if it is None."""
    values = step.values
    if where is None or len(where.registers) > 1:
        return values.atoms.unknown(("address", step.at), 0, values.block, f"address of {name}", 64)
    if not where.registers:
        return number(where.offset)
    low, high = registers_from(where.registers[0], 2)
    words = values.words
    try:
        pair = words.whole(words.pair(step.held(low), step.held(high)))
        return modulo(total(number(where.offset), pair), 64)
    except TooLarge:
        return values.lost(64)
