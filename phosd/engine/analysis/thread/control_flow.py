"""Divide a function's code into blocks, and find its loops.

Each thread is followed by itself. What reconverges the threads of a warp (``BSSY``, ``BSYNC``,
``WARPSYNC``) changes no thread's own path. A subroutine is no part of the graph: ``calls`` tells
where one begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from phosd.engine.analysis.code.disassembly import INSTRUCTION_BYTES, Instruction
from phosd.engine.analysis.code.operands import (
    Predicate,
    parse_all,
    parse_guard,
    parse_opcode,
    target,
)
from phosd.engine.analysis.values.terms import carried_by

Branches: TypeAlias = Mapping[int, Sequence[int]]
"""Offsets of instructions, by the offset of the branch that may lead there."""

MAX_INSTRUCTIONS = 1 << 18
_JUMPS = frozenset(("BRA", "EXIT", "RET", "KILL", "WARPSYNC", "BRX", "JMP", "JMX"))
"""What may leave a block; ``BRXU``, ``JMXU`` and ``CALL`` by an address are refused."""


class Unknown(Exception):
    """The function does what is not understood; ``reason`` names it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Edge:
    """A way to another block; ``guard`` is what holds for whoever takes it, None: nothing is
    known.
    """

    source: int
    to: int
    guard: Predicate | None


@dataclass
class Block:
    """Instructions ``[begin, end)`` without a branch but the last; None as ``jump`` is none."""

    begin: int
    end: int
    out: list[Edge] = field(default_factory=list)
    into: list[Edge] = field(default_factory=list)


@dataclass
class Loop:
    """A natural loop: its header, its blocks (with those of loops inside it) and the edges back."""

    header: int
    blocks: set[int]
    back: list[Edge]

    def changes(self) -> set[int]:
        """Return what may give a value anew in each iteration, as an atom tells it (``born``)."""
        return self.blocks | {carried_by(header) for header in self.blocks}


@dataclass(frozen=True)
class Graph:
    """The blocks that are reached from ``entry``, in an order in which each comes after all that
    come before it but by a loop's edge back. Blocks are named by their first instruction.
    """

    blocks: dict[int, Block]
    order: list[int]
    loops: dict[int, Loop]


def _invert(guard: Predicate) -> Predicate:
    return Predicate(guard.name, not guard.inverted)


def _jump(
    code: Sequence[Instruction], at: int, branches: Branches
) -> tuple[list[Edge], bool] | None:
    """Return the edges of the instruction but the one to the next, whether that is also taken and
    its guard; None if it is no jump.
    """
    instruction = code[at]
    name, modifiers = parse_opcode(instruction.opcode)
    if name not in _JUMPS:
        if name in ("BRXU", "JMXU"):
            raise Unknown("indirect branch")
        return None
    guard = parse_guard(instruction.predicate)
    if guard is not None and not guard.name:
        if guard.inverted:  # never
            return None
        guard = None
    if name in ("EXIT", "KILL", "RET"):
        return [], guard is not None or not (name == "RET" or _guard_decides(instruction))
    if name == "WARPSYNC":
        if "COLLECTIVE" not in modifiers:
            return None
        return [Edge(at, _target(code, at), None)], True
    if name == "BRX":
        targets = branches.get(at * INSTRUCTION_BYTES)
        if not targets:
            raise Unknown("indirect branch")
        return [Edge(at, _inside(code, one), None) for one in targets], guard is not None
    if name != "BRA":
        raise Unknown("indirect branch")
    if not _guard_decides(instruction):
        return [Edge(at, _target(code, at), None)], True
    return [Edge(at, _target(code, at), guard)], guard is not None


def _otherwise(instruction: Instruction, jump: tuple[list[Edge], bool] | None) -> Predicate | None:
    """Return what holds for who goes on behind the last instruction of a block."""
    if jump is None:
        return None
    guard = parse_guard(instruction.predicate) if _guard_decides(instruction) else None
    return None if guard is None else _invert(guard)


def _guard_decides(instruction: Instruction) -> bool:
    """Return whether a jump's guard alone decides who takes it: not another predicate (``EXIT P1``)
    nor other threads (``BRA.U.ANY``).
    """
    name, modifiers = parse_opcode(instruction.opcode)
    operands = 1 if name == "BRA" else 0
    return (
        name in ("BRA", "EXIT", "KILL")
        and not modifiers
        and len(parse_all(instruction.operands)) == operands
    )


def _target(code: Sequence[Instruction], at: int) -> int:
    return _inside(code, target(code[at]))


def _inside(code: Sequence[Instruction], offset: int | None) -> int:
    if offset is None or offset % INSTRUCTION_BYTES or offset // INSTRUCTION_BYTES >= len(code):
        raise Unknown("branch to elsewhere")
    return offset // INSTRUCTION_BYTES


def build(code: Sequence[Instruction], entry: int, branches: Branches) -> Graph:
    """Return the graph of what is reached from ``entry``; ``branches`` has the targets of those
    through registers. Raises :class:`Unknown`.
    """
    if len(code) > MAX_INSTRUCTIONS:
        raise Unknown("too large")
    jumps, leaders = _explore(code, entry, branches)
    blocks: dict[int, Block] = {}
    for leader in sorted(leaders):
        end = leader + 1
        while end - 1 not in jumps and end not in leaders and end < len(code):
            end += 1
        block = blocks[leader] = Block(leader, end)
        jump = jumps.get(end - 1)
        edges, on = jump if jump else ([], True)
        block.out = [Edge(leader, edge.to, edge.guard) for edge in edges]
        if on:
            block.out.append(Edge(leader, end, _otherwise(code[end - 1], jump)))
    for block in blocks.values():
        for edge in block.out:
            if edge.to not in blocks:
                raise Unknown("runs out of its code")
            blocks[edge.to].into.append(edge)
    order = _order(blocks, entry)
    loops = _loops(blocks, order)
    if loops is None:
        _give_headers(blocks, entry, len(code))
        order = _order(blocks, entry)
        loops = _loops(blocks, order)
        assert loops is not None
    return Graph(blocks, order, loops)


def _explore(
    code: Sequence[Instruction], entry: int, branches: Branches
) -> tuple[dict[int, tuple[list[Edge], bool]], set[int]]:
    """Return the jumps that are reached, and where blocks begin."""
    jumps: dict[int, tuple[list[Edge], bool]] = {}
    leaders = {entry}
    seen: set[int] = set()
    ahead = [entry]
    while ahead:
        at = ahead.pop()
        while at not in seen:
            if at >= len(code):
                raise Unknown("runs out of its code")
            seen.add(at)
            jump = _jump(code, at, branches)
            if jump is None:
                at += 1
                continue
            jumps[at] = jump
            edges, on = jump
            for edge in edges:
                leaders.add(edge.to)
                ahead.append(edge.to)
            if not on:
                break
            at += 1
            leaders.add(at)
    return jumps, leaders & seen


def _give_headers(blocks: dict[int, Block], entry: int, name: int) -> None:
    """Let each loop be entered in one block. That of the function's entry is entered there alone.

    Before the several blocks in which a loop is entered comes another that is empty, and from which
    a thread may go to any of them: those are more ways than there are. They are named from ``name``
    on.
    """
    ahead = [set(blocks)]
    while ahead:
        inside = ahead.pop()
        for loop in _components(blocks, inside):
            entries = {
                one
                for one in loop
                if one == entry or any(edge.source not in loop for edge in blocks[one].into)
            }
            if len(entries) > 1:
                header = blocks[name] = Block(name, name)
                for one in sorted(entries):
                    _redirect(blocks, one, header)
                name += 1
                ahead.append(loop)
            else:
                ahead.append(loop - entries)


def _redirect(blocks: dict[int, Block], to: int, header: Block) -> None:
    """Let all that leads to a block lead to the header, and that to the block."""
    for edge in blocks[to].into:
        instead = Edge(edge.source, header.begin, edge.guard)
        out = blocks[edge.source].out
        out[out.index(edge)] = instead
        header.into.append(instead)
    forth = Edge(header.begin, to, None)
    blocks[to].into = [forth]
    header.out.append(forth)


def _components(blocks: dict[int, Block], inside: set[int]) -> list[set[int]]:
    """Return the sets of blocks that lead to each other by edges within ``inside`` (Tarjan)."""
    found: list[set[int]] = []
    numbers: dict[int, int] = {}
    lowest: dict[int, int] = {}
    open_: dict[int, None] = {}
    for root in sorted(inside):
        if root in numbers:
            continue
        stack = [(root, iter(blocks[root].out))]
        numbers[root] = lowest[root] = len(numbers)
        open_[root] = None
        while stack:
            name, edges = stack[-1]
            for edge in edges:
                to = edge.to
                if to not in inside:
                    continue
                if to not in numbers:
                    numbers[to] = lowest[to] = len(numbers)
                    open_[to] = None
                    stack.append((to, iter(blocks[to].out)))
                    break
                if to in open_:
                    lowest[name] = min(lowest[name], numbers[to])
            else:
                stack.pop()
                if stack:
                    above = stack[-1][0]
                    lowest[above] = min(lowest[above], lowest[name])
                if lowest[name] == numbers[name]:
                    component: set[int] = set()
                    while name not in component:
                        component.add(open_.popitem()[0])
                    if len(component) > 1 or any(edge.to == name for edge in blocks[name].out):
                        found.append(component)
    return found


def _order(blocks: dict[int, Block], entry: int) -> list[int]:
    """Return the blocks in reverse postorder."""
    finished: list[int] = []
    seen = {entry}
    stack = [(entry, iter(blocks[entry].out))]
    while stack:
        name, edges = stack[-1]
        for edge in edges:
            if edge.to not in seen:
                seen.add(edge.to)
                stack.append((edge.to, iter(blocks[edge.to].out)))
                break
        else:
            finished.append(name)
            stack.pop()
    return finished[::-1]


def _dominators(blocks: dict[int, Block], order: list[int]) -> dict[int, int]:
    """Return the immediate dominator of each block (Cooper, Harvey, Kennedy)."""
    place = {name: at for at, name in enumerate(order)}
    found = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for name in order[1:]:
            new: int | None = None
            for edge in blocks[name].into:
                if edge.source not in found:
                    continue
                other = edge.source
                if new is None:
                    new = other
                    continue
                while new != other:
                    while place[new] > place[other]:
                        new = found[new]
                    while place[other] > place[new]:
                        other = found[other]
            assert new is not None  # each block is reached
            if found.get(name) != new:
                found[name] = new
                changed = True
    return found


def _loops(blocks: dict[int, Block], order: list[int]) -> dict[int, Loop] | None:
    """Return the loops by their headers; None: there is one that has none."""
    place = {name: at for at, name in enumerate(order)}
    dominators = _dominators(blocks, order)
    loops: dict[int, Loop] = {}
    for name in order:
        for edge in blocks[name].out:
            if place[edge.to] > place[name]:
                continue
            above = name
            while place[above] > place[edge.to]:
                above = dominators[above]
            if above != edge.to:
                return None
            loop = loops.setdefault(edge.to, Loop(edge.to, {edge.to}, []))
            loop.back.append(edge)
            ahead = [name]
            while ahead:
                inside = ahead.pop()
                if inside not in loop.blocks:
                    loop.blocks.add(inside)
                    ahead += [before.source for before in blocks[inside].into]
    return loops
