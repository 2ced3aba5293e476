"""Say who follows which instruction.

NVIDIA documents the opcodes' names alone; that they compute this is checked against the software
GPU, which runs the same kernels from PTX (``tests/native/analysis``).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from phosd.engine.analysis.thread import comparisons, integer, moves
from phosd.engine.analysis.thread.step import State, Step

Handler: TypeAlias = Callable[[Step], State]

_FORMS: dict[str, tuple[Handler, str]] = {
    "CS2R": (moves.load_special, "32"),
    "HFMA2": (moves.half_constant, "MMA"),
    "IABS UIABS": (integer.absolute, ""),
    "IADD3 UIADD3": (integer.add, "64 X"),
    "IMAD UIMAD": (integer.multiply, "HI IADD MOV SHL U32 WIDE X"),
    "IMNMX UIMNMX": (integer.extreme, "U32"),
    "ISETP UISETP": (comparisons.set_predicate, "AND EQ EX GE GT LE LT NE OR U32 XOR"),
    "LDC ULDC": (moves.load_constant, "128 64 S16 S8 U16 U8"),
    "LEA ULEA": (integer.shift_and_add, "HI SX32 X"),
    "LOP3 ULOP3": (integer.logic, "LUT"),
    "MOV UMOV": (moves.move, ""),
    "PLOP3 UPLOP3": (comparisons.combine_predicates, "LUT"),
    "PRMT UPRMT": (integer.permute, ""),
    "R2UR": (moves.to_uniform, ""),
    "S2R": (moves.load_special, ""),
    "S2UR": (moves.load_special, ""),
    "SEL USEL": (moves.select_by_predicate, ""),
    "SGXT USGXT": (integer.extend, "U32"),
    "SHF USHF": (integer.shift, "HI L R S32 S64 U32 U64 W"),
    "VIADD": (integer.add_two, ""),
    "VIMNMX": (integer.extreme, "U32"),
}
"""The functions that follow instructions, by these, and the modifiers: none is ignored."""
_HANDLERS = {
    name: (handler, frozenset(modifiers.split()))
    for names, (handler, modifiers) in _FORMS.items()
    for name in names.split()
}


def handler(name: str, modifiers: Sequence[str]) -> Handler | None:
    """Return what follows an instruction; None: its results may be anything."""
    found = _HANDLERS.get(name)
    return found[0] if found and found[1].issuperset(modifiers) else None
