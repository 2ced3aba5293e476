"""Loops of any shape: each gets one header, and no way is lost."""

from __future__ import annotations

import random

import pytest

from phosd.engine.analysis.thread.control_flow import Block, Graph, Unknown, build
from tests.unit.engine.analysis.listing import code

INSTRUCTIONS = 14


def written(seed: int) -> str:
    """Return a listing of branches to anywhere."""
    r = random.Random(seed)

    def one() -> str:
        target = f"BRA {16 * r.randrange(INSTRUCTIONS):#x}"
        return r.choice((target, f"@P0 {target}", f"@P1 {target}", "NOP", "NOP", "@P2 EXIT"))

    return "\n".join([*(one() for _ in range(INSTRUCTIONS - 1)), "EXIT"])


def leads_to(graph: Graph, block: Block, at: int) -> bool:
    """Return whether a thread gets from a block to an instruction, but for empty blocks at once."""
    ahead = [edge.to for edge in block.out]
    seen: set[int] = set()
    while ahead:
        name = ahead.pop()
        if name == at:
            return True
        if name not in seen and graph.blocks[name].begin == graph.blocks[name].end:
            seen.add(name)
            ahead += [edge.to for edge in graph.blocks[name].out]
    return False


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_loops_have_headers_and_no_way_is_lost(first: int) -> None:
    shapes = 0
    for seed in range(first, first + 100):
        listing = code(written(seed))
        try:
            graph = build(listing, 0, {})
        except Unknown:  # a kernel that runs out of its code
            continue
        shapes += any(block.begin == block.end for block in graph.blocks.values())
        for block in graph.blocks.values():
            if block.begin == block.end:
                continue
            last = listing[block.end - 1]
            where = int(last.operands, 16) // 16 if last.opcode == "BRA" else None
            assert where is None or leads_to(graph, block, where)
            goes_on = last.opcode == "NOP" or bool(last.predicate)
            assert not goes_on or leads_to(graph, block, block.end)
            for edge in block.out:
                assert edge in graph.blocks[edge.to].into
        order = {name: place for place, name in enumerate(graph.order)}
        for loop in graph.loops.values():
            for name in loop.blocks - {loop.header}:
                assert all(edge.source in loop.blocks for edge in graph.blocks[name].into)
                assert order[loop.header] < order[name]
    assert shapes > 10  # loops that are entered in several places
