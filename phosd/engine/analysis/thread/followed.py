"""Say what following a thread through a kernel finds."""

from dataclasses import dataclass, field
from typing import Any

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.thread.control_flow import Loop
from phosd.engine.analysis.values.atoms import Atoms
from phosd.engine.analysis.values.conditions import Facts
from phosd.engine.analysis.values.terms import Atom, Term, TooLarge, difference, modulo


@dataclass(frozen=True)
class Access:
    """An instruction's access to ``size`` bytes at ``address``; ``facts`` hold there.

    With ``through_map``, it is to what the tensor map at ``address`` describes. With
    ``after_write``, whoever gets there has written all of these bytes before: what is read is not
    what was there before the launch.
    """

    at: int
    opcode: str
    use: Use
    address: Term
    size: int
    facts: Facts
    through_map: bool = False
    after_write: bool = False


@dataclass
class Carried:
    """What a loop's atom is when the loop is entered, and at each edge back."""

    initial: Term
    again: list[Term] = field(default_factory=list)

    def step(self, atom: Atom, loop: Loop, width: int) -> Term | None:
        """Return what each iteration adds; None: it is not the same for all."""
        held = Term({(atom,): 1})
        try:
            steps = {modulo(difference(term, held), width) for term in self.again}
        except TooLarge:
            return None
        if len(steps) != 1:
            return None
        (step,) = steps
        return step if not step.born & loop.changes() else None


@dataclass
class Followed:
    """What was found in a kernel. ``carried`` is by the loops' atoms; ``again`` has what holds on
    all edges back to a header, and ``met`` what holds on each of the ways that meet in a block.
    ``parameter_bytes`` is the size of its parameters, and ``prints`` set if it may print.
    """

    atoms: Atoms
    accesses: list[Access]
    carried: dict[Any, Carried]
    loops: dict[int, Loop]
    again: dict[int, Facts]
    met: dict[int, list[Facts]]
    parameter_bytes: int
    prints: bool
