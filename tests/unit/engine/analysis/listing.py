"""Machine code as text, so that tests need no tools."""

from __future__ import annotations

from phosd.engine.analysis.code.cubin import Kernel, Parameter
from phosd.engine.analysis.code.disassembly import Instruction
from phosd.engine.analysis.thread.follow import follow
from phosd.engine.analysis.thread.followed import Followed

BASE = 0x210
"""Where parameters begin in constant bank 0 on Hopper."""

PREPARED = """
LDC.64 R2,c[0x0][0x210]
S2R R0,SR_TID.X
"""
"""The first parameter, a pointer, is in R2 and R3, the thread's index in R0."""


def code(text: str) -> list[Instruction]:
    """Read a listing: ``@P0 OPCODE OPERANDS`` in each line."""
    instructions = []
    for line in filter(None, text.splitlines()):
        guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        opcode, _, operands = rest.partition(" ")
        instructions.append(Instruction(opcode, operands, guard))
    return instructions


def kernel(size: int = 64, **subroutines: int) -> Kernel:
    """Return a kernel ``k`` with parameters of 8 bytes."""
    parameters = tuple(Parameter(offset, 8) for offset in range(0, size, 8))
    return Kernel(
        "k",
        BASE,
        size,
        parameters,
        {"k": 0, **subroutines},
        {0x8: "__assertfail", 0x10: "vprintf"},
        {0x40: (0x50, 0x70)},
    )


def followed(text: str, **subroutines: int) -> Followed:
    """Follow a listing."""
    return follow(kernel(**subroutines), code(text))
