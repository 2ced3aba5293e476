"""Follow a kernel's threads through its code, and note what memory each instruction accesses.

One sweep follows every block once, in an order in which a block comes after all that lead to it,
but for the edges back of loops. Where ways meet, a register holds a choice. At a loop's header it
holds an atom that stands for all iterations, if the loop writes it: what that atom is, is read off
the edges back afterwards (:class:`Carried`), and used when ranges are computed.

A condition holds in a block if it does on all edges into it. That is kept for a loop's header from
the edges that enter it: those conditions are about values that the loop does not change.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from phosd.engine.analysis.code.cubin import Kernel
from phosd.engine.analysis.code.disassembly import INSTRUCTION_BYTES, Instruction
from phosd.engine.analysis.code.opcodes import ACCESSES, KNOWN, STORES, in_order, results
from phosd.engine.analysis.code.operands import (
    NotUnderstood,
    parse_all,
    parse_guard,
    parse_opcode,
    registers_from,
)
from phosd.engine.analysis.thread.addresses import place_of
from phosd.engine.analysis.thread.control_flow import Block, Edge, Graph, Loop, Unknown, build
from phosd.engine.analysis.thread.followed import Access, Carried, Followed
from phosd.engine.analysis.thread.instructions import handler
from phosd.engine.analysis.thread.moves import select
from phosd.engine.analysis.thread.step import NotModelled, State, Step, Values, held_condition
from phosd.engine.analysis.thread.stores import Stores
from phosd.engine.analysis.thread.subroutines import ASSERTION, HARMLESS, Subroutines
from phosd.engine.analysis.values.atoms import Atoms
from phosd.engine.analysis.values.conditions import Condition, Facts, Opaque, implied, table
from phosd.engine.analysis.values.terms import MAX_DEPTH, Kind, Range, Term, TooLarge, number
from phosd.engine.analysis.values.words import Word, Words

_MOST_FACTS = 256
"""Facts may be left out: without them a range is larger, not wrong."""
_LOADED = {"U8": (0, 0xFF), "S8": (-0x80, 0x7F), "U16": (0, 0xFFFF), "S16": (-0x8000, 0x7FFF)}
_LOADS = frozenset(("LD", "LDG", "LDL", "LDS", "LDSM", "ATOM", "ATOMG", "ATOMS"))


def follow(kernel: Kernel, code: Sequence[Instruction]) -> Followed:
    """Follow a kernel. Raises :class:`Unknown`."""
    try:
        return _follow(kernel, code)
    except NotUnderstood as error:
        raise Unknown(str(error)) from error
    except TooLarge as error:
        raise Unknown("too large") from error


def _follow(kernel: Kernel, code: Sequence[Instruction]) -> Followed:
    graph = build(
        code, kernel.subroutines.get(kernel.name, 0) // INSTRUCTION_BYTES, kernel.branches
    )
    last = (code[one.end - 1].opcode for one in graph.blocks.values() if one.begin < one.end)
    if any(opcode.startswith("RET") for opcode in last):
        raise Unknown("return to elsewhere")
    atoms = Atoms()
    words = Words(atoms)
    values = Values(kernel, atoms, words)
    known = -1
    while known != len(words.paired):  # two registers of a loop may turn out to be one number
        known = len(words.paired)
        sweep = _Sweep(values, code, graph)
        sweep.run()
    return Followed(
        atoms,
        sweep.accesses,
        sweep.carried,
        graph.loops,
        sweep.again,
        sweep.met,
        kernel.size,
        sweep.prints,
    )


class _Ended(Exception):
    """The thread ends here."""


class _Sweep:
    def __init__(self, values: Values, code: Sequence[Instruction], graph: Graph) -> None:
        self.values = values
        self.code = code
        self.graph = graph
        self.subroutines = Subroutines(code, values.kernel)
        self.accesses: list[Access] = []
        self.carried: dict[Any, Carried] = {}
        self.again: dict[int, Facts] = {}
        self.met: dict[int, list[Facts]] = {}
        self.prints = False
        self._pairs: dict[int, dict[str, str]] = {}
        self._states: dict[tuple[int, int], State] = {}
        self._facts: dict[tuple[int, int], Facts] = {}
        self._stores: dict[tuple[int, int], Stores] = {}
        self._written = {name: self._written_by(graph.blocks[name]) for name in graph.blocks}

    def run(self) -> None:
        for name in self.graph.order:
            self.values.block = name
            block = self.graph.blocks[name]
            loop = self.graph.loops.get(name)
            back = loop.back if loop else []
            ahead = self._taken([edge for edge in block.into if edge not in back])
            if not ahead and name != self.graph.order[0]:  # nobody comes here
                continue
            state, facts = self._meet(name, ahead)
            stores = Stores.met([self._stores[key] for key in ahead])
            if loop:
                self._begin_loop(loop, state)
            self._block(block, state, facts, stores)
        for loop in self.graph.loops.values():
            self._end_loop(loop)

    def _written_by(self, block: Block) -> set[str]:
        found: set[str] = set()
        for at in range(block.begin, block.end):
            instruction = self.code[at]
            name, modifiers = parse_opcode(instruction.opcode)
            if name == "CALL":
                found |= self.subroutines.at(at).written
            else:
                found.update(results(name, modifiers, parse_all(instruction.operands)))
        return found

    # Where ways meet.

    def _meet(self, name: int, keys: Sequence[tuple[int, int]]) -> tuple[State, Facts]:
        if not keys:
            return {}, frozenset()
        states = [self._states[key] for key in keys]
        each = [self._facts[key] for key in keys]
        facts = frozenset.intersection(*each)
        self.met[name] = [one - facts for one in each]
        if len(states) == 1:
            return dict(states[0]), facts
        merged: State = {}
        key = ("meet", name)
        born = frozenset((name,))
        for register in dict.fromkeys(chain(*states)):
            held = [one for state in states if (one := state.get(register)) is not None]
            first = held[0]
            if all(one is first or one == first for one in held):
                merged[register] = first
            elif register.startswith(("P", "UP")):
                merged[register] = Opaque((name, register))
            else:
                # What was never written is not used: an alternative that it is one is none.
                # Otherwise keys must choose alike: all registers have all alternatives.
                words = tuple(state.get(register, first) for state in states)
                merged[register] = self._chosen(key, words, born)
        return merged, facts

    def _chosen(self, key: tuple[Any, ...], words: tuple[Word, ...], born: frozenset[int]) -> Word:
        try:
            return self.values.words.choice(key, words, born)
        except TooLarge:
            return self.values.words.choice(key, tuple(map(self._shallow, words)), born)

    def _shallow(self, word: Word) -> Word:
        """Return a word in which others may be nested: one that may be anything for one in which
        too much is.
        """
        return word if self.values.words.depth(word) < MAX_DEPTH // 2 else self.values.lost(32)

    def _taken(self, edges: Sequence[Edge]) -> list[tuple[int, int]]:
        """Return the edges that somebody takes, each as its source and its place among the edges
        out of it.
        """
        keys = [(one.source, self.graph.blocks[one.source].out.index(one)) for one in edges]
        return [key for key in keys if key in self._states]

    def _word(self, register: str, held: Word | None) -> Word:
        if held is not None:
            return held
        return self.values.uninitialised(register)

    # Loops.

    def _begin_loop(self, loop: Loop, state: State) -> None:
        header, words = loop.header, self.values.words
        written = set().union(*(self._written[name] for name in loop.blocks))
        for register in sorted(written):
            if register.startswith(("P", "UP")):
                state[register] = Opaque((header, register))
        registers = {one for one in written if not one.startswith(("P", "UP"))}
        initial = {one: self._word(one, state.get(one)) for one in registers}
        pairs = self._pairs[header] = self._disjoint(header, registers)
        for register in sorted(registers - set(pairs.values())):
            high = pairs.get(register)
            atom = self.values.atoms.loop(header, register, 32 if high is None else 64)
            state[register] = atom
            if high is not None:
                state[high] = words.high(atom)
            first = self._number(initial[register], None if high is None else initial[high])
            self.carried[atom.atom] = Carried(first)

    def _disjoint(self, header: int, registers: set[str]) -> dict[str, str]:
        """Return the registers that the loop writes two of which are one number, the lower half
        first. Each register belongs to at most one number.
        """
        found: dict[str, str] = {}
        taken: set[str] = set()
        for where, low, high in sorted(self.values.words.paired):
            if where == header and {low, high} <= registers and not {low, high} & taken:
                found[low] = high
                taken |= {low, high}
        return found

    def _end_loop(self, loop: Loop) -> None:
        pairs = self._pairs.get(loop.header)
        if pairs is None:  # nobody comes here
            return
        keys = self._taken(loop.back)
        each = [self._facts[key] for key in keys]
        self.again[loop.header] = frozenset.intersection(*each) if each else frozenset()
        for atom, carried in self.carried.items():
            header, register, _ = atom.args
            if header != loop.header:
                continue
            for key in keys:
                state = self._states[key]
                low = self._word(register, state.get(register))
                upper = pairs.get(register)
                high = None if upper is None else self._word(upper, state.get(upper))
                carried.again.append(self._number(low, high))

    def _number(self, low: Word, high: Word | None) -> Term:
        words = self.values.words
        try:
            return words.term(low) if high is None else words.whole(words.pair(low, high))
        except TooLarge:
            return self.values.lost(64)

    # Blocks.

    def _block(self, block: Block, state: State, facts: Facts, stores: Stores) -> None:
        for at in range(block.begin, block.end):
            instruction = self.code[at]
            guard = parse_guard(instruction.predicate)
            given = True if guard is None else held_condition(state, guard, facts)
            if given is False:
                continue
            try:
                stores = self._instruction(at, instruction, state, facts, given, stores)
            except _Ended:
                return
        for place, edge in enumerate(block.out):
            condition = True if edge.guard is None else held_condition(state, edge.guard, facts)
            if condition is False:
                continue
            self._states[block.begin, place] = state
            more = frozenset(implied(condition)) if len(facts) < _MOST_FACTS else frozenset()
            self._facts[block.begin, place] = facts | more
            self._stores[block.begin, place] = stores

    def _instruction(
        self,
        at: int,
        instruction: Instruction,
        state: State,
        facts: Facts,
        given: Condition,
        stores: Stores,
    ) -> Stores:
        """Follow an instruction, and return what the thread has written with it."""
        name, modifiers = parse_opcode(instruction.opcode)
        if name not in KNOWN or (name == "CCTL" and "IVALL" not in modifiers):
            raise Unknown(f"instruction {name}")
        if name == "CALL":
            written = self._call(at, state, given)
        else:
            operands = parse_all(instruction.operands)
            if given is not True:
                facts |= frozenset(implied(given))
            step = Step(self.values, at, modifiers, operands, state, facts, given)
            if name in ACCESSES:
                stores = self._access(step, instruction, name, stores)
            written = self._results(step, name)
        for register, new in written.items():
            if given is not True and (old := state.get(register)) is not None:
                new = self._either(given, new, old, register)
            state[register] = new
        return stores

    def _results(self, step: Step, name: str) -> State:
        if follows := handler(name, step.modifiers):
            for step.coarse in (False, True):
                try:
                    return follows(step)
                except TooLarge:
                    continue
                except NotModelled:
                    break
                except (ValueError, IndexError):  # operands in another form than it takes
                    break
        names = results(name, step.modifiers, step.operands)
        within: Range = None
        why = f"instruction {name}"
        if name in _LOADS:
            why = "loaded"
            within = next((_LOADED[word] for word in step.modifiers if word in _LOADED), None)
        return self._anything(step.at, names, why, within)

    def _anything(self, at: object, names: Sequence[str], why: str, within: Range = None) -> State:
        registers = [one for one in names if not one.startswith(("P", "UP"))]
        words = self.values.unknown(at, 32 * len(registers), why, within)
        state: State = dict(zip(registers, words, strict=True))
        state.update({one: Opaque((at, one)) for one in names if one.startswith(("P", "UP"))})
        return state

    def _either(self, given: Condition, new: Any, old: Any, register: str) -> Any:
        """Return what a register holds after an instruction that only some execute."""
        if register.startswith(("P", "UP")):
            return table(0xCA, given, new, old)
        try:
            return select(self.values, given, new, old)
        except TooLarge:
            return select(self.values, given, self._shallow(new), self._shallow(old))

    def _call(self, at: int, state: State, given: Condition) -> State:
        subroutine = self.subroutines.at(at)
        if subroutine.pointer:
            name = self._called(subroutine.pointer, state)
            if name not in HARMLESS:
                raise Unknown(f"call of {name or 'a pointer'}")
            if name == ASSERTION and given is True:
                raise _Ended
            self.prints = self.prints or name != ASSERTION
        if register := subroutine.returns_to:
            behind = number((at + 1) * INSTRUCTION_BYTES)
            if self._word(register, state.get(register)) != behind:
                raise Unknown("return to elsewhere")
        return self._anything(at, sorted(subroutine.written), "result of a subroutine")

    def _called(self, pointer: str, state: State) -> str:
        """Return the name of the function that a register points to, if it is known."""
        low, high = (self._word(one, state.get(one)) for one in registers_from(pointer, 2))
        atom = self.values.words.pair(low, high).atom
        place = atom.args[0] if atom and atom.kind is Kind.UNKNOWN else None
        if isinstance(place, tuple) and place[0] == "constant" and place[1][0] == 4:
            return self.values.kernel.addresses.get(place[1][1], "")
        return ""

    def _access(self, step: Step, instruction: Instruction, name: str, stores: Stores) -> Stores:
        place = place_of(step, name, ACCESSES[name])
        access = Access(
            step.at,
            instruction.opcode,
            place.use,
            place.address,
            place.size,
            step.facts,
            place.through_map,
        )
        where = access.address, access.size
        if name in STORES:
            stores = stores.with_one(*where, step.given)
        elif in_order(name, step.modifiers) and stores.cover(*where, access.facts):
            access = replace(access, after_write=True)
        self.accesses.append(access)
        return stores
