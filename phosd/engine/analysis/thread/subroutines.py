"""Say what a subroutine may change, without following it.

The compiler calls subroutines that divide, take roots or finish what is rare: they compute with
registers, and access no memory. Such a one leaves anything in each register that it writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phosd.engine.analysis.code.cubin import Kernel
from phosd.engine.analysis.code.disassembly import INSTRUCTION_BYTES, Instruction
from phosd.engine.analysis.code.opcodes import ACCESSES, KNOWN, results
from phosd.engine.analysis.code.operands import Other, Register, parse_all, parse_opcode, target
from phosd.engine.analysis.thread.control_flow import Graph, Unknown, build

ASSERTION = "__assertfail"
"""Does not return: an assertion that does not hold ends the kernel."""
HARMLESS = frozenset((ASSERTION, "vprintf"))
"""The driver's functions, which write to its own buffers."""
_EVERY = frozenset(
    [f"R{number}" for number in range(255)]
    + [f"UR{number}" for number in range(63)]
    + [f"{kind}{number}" for kind in ("P", "UP") for number in range(7)]
)
_DEEPEST = 8


@dataclass(frozen=True)
class Subroutine:
    """The registers that it may write, and the first of the two with the address that it returns
    to; empty: it returns behind the call, if at all. ``pointer`` is the register with the address
    of a function that is no part of the kernel.
    """

    written: frozenset[str]
    returns_to: str
    pointer: str = ""


class Subroutines:
    """The subroutines of one kernel."""

    def __init__(self, code: Sequence[Instruction], kernel: Kernel) -> None:
        self._code = code
        self._kernel = kernel
        self._known: dict[int, Subroutine] = {}

    def at(self, call: int, depth: int = 0) -> Subroutine:
        """Return what the ``CALL`` at this place calls. Raises :class:`Unknown`."""
        instruction = self._code[call]
        _, modifiers = parse_opcode(instruction.opcode)
        entry = target(instruction)
        if entry is None:
            name = _name(instruction)
            if "ABS" in modifiers:
                return Subroutine(_EVERY, "", name)
            if name not in self._kernel.subroutines or "REL" not in modifiers:
                raise Unknown("call of another function")
            entry = self._kernel.subroutines[name]
        if depth > _DEEPEST:
            raise Unknown("calls too deep")
        first = entry // INSTRUCTION_BYTES
        if first not in self._known:
            self._known[first] = self._look(first, depth)
        return self._known[first]

    def _look(self, entry: int, depth: int) -> Subroutine:
        written: set[str] = set()
        graph = build(self._code, entry, self._kernel.branches)
        for block in graph.blocks.values():
            for at in range(block.begin, block.end):
                instruction = self._code[at]
                name, modifiers = parse_opcode(instruction.opcode)
                if name in ACCESSES:
                    raise Unknown("subroutine that accesses memory")
                if name not in KNOWN or name in ("CCTL", "STL", "EXIT"):
                    raise Unknown(f"subroutine with {name}")
                if name == "CALL":
                    written |= self.at(at, depth + 1).written
                else:
                    written |= set(results(name, modifiers, parse_all(instruction.operands)))
        returns = self._returns(graph)
        if len(returns) != 1 or None in returns:
            raise Unknown("subroutine that computes where it returns to")
        return Subroutine(frozenset(written), returns.pop() or "")

    def _returns(self, graph: Graph) -> set[str | None]:
        """Return the registers that hold, when the subroutine begins, what it returns to; None
        for what is no copy of one.
        """
        returns: set[str | None] = set()
        copies: dict[int, dict[str, str | None]] = {graph.order[0]: {}}
        ahead = [graph.order[0]]
        while ahead:
            block = graph.blocks[ahead.pop()]
            held = dict(copies[block.begin])
            for at in range(block.begin, block.end):
                if self._code[at].opcode.startswith("RET"):
                    register = self._code[at].operands.split(",")[0].strip()
                    returns.add(held.get(register, register))
                self._copy(at, held)
            for edge in block.out:
                before = copies.get(edge.to)
                if before is None:
                    after = dict(held)
                else:
                    both = before.keys() | held.keys()
                    after = {
                        one: before.get(one, one)
                        if before.get(one, one) == held.get(one, one)
                        else None
                        for one in both
                    }
                if after != before:
                    copies[edge.to] = after
                    ahead.append(edge.to)
        return returns

    def _copy(self, at: int, held: dict[str, str | None]) -> None:
        """Note which registers an instruction makes copies of others."""
        instruction = self._code[at]
        name, modifiers = parse_opcode(instruction.opcode)
        operands = parse_all(instruction.operands)
        written = self.at(at).written if name == "CALL" else results(name, modifiers, operands)
        copied: str | None = None
        if name == "MOV" or (name == "IMAD" and modifiers[:1] == ("MOV",)):
            source = operands[-1]
            if isinstance(source, Register) and source == Register(
                source.name, uniform=source.uniform
            ):
                copied = held.get(source.name, source.name) or None
        for register in written:
            held[register] = None if instruction.predicate else copied


def _name(instruction: Instruction) -> str:
    operands = parse_all(instruction.operands)
    match operands[-1] if operands else None:
        case Other(text):
            return text.strip("`()")
        case Register(name, plain=True):
            return name
    return ""
