"""Find which inputs of a kernel are pointers, and what is done through them.

An input that only moves addresses need not be compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.provenance import POINTER_BYTES, Origin
from phosd.engine.analysis.summary import ANY
from phosd.engine.analysis.table_layout import FACTOR, KIND, NODE_KINDS, NONE
from phosd.engine.analysis.thread.followed import Access


@dataclass(frozen=True)
class Nodes:
    """The nodes of a body, each with the fields of ``NODE``, and the lists that they refer to."""

    nodes: Sequence[Sequence[int]]
    factors: Sequence[bytes]
    refs: Sequence[int]

    def parameter(self, at: int) -> int | None:
        """Return the number of the input that a node is; None if it is another node."""
        node = self.nodes[at]
        return node[3] if node[0] == KIND["Parameter"] else None

    def children(self, at: int) -> Iterable[tuple[int, bool]]:
        """Yield the nodes that a node is made of, and whether they are added to an address as they
        are if the node is.
        """
        kind, bits, count, one, where, other, _, _ = self.nodes[at]
        name = NODE_KINDS[kind]
        refs = self.refs[where : where + count]
        if name == "Sum":
            for raw in self.factors[where : where + count]:
                factor, node, _ = FACTOR.unpack(raw)
                yield node, factor == 1
        elif name == "Word":
            yield one, bits == 64
        elif name == "Choice":
            for node in refs:
                yield node, True
        elif name == "Carried":
            yield one, bits == 64
            if other != NONE:
                yield other, False
        elif name == "Common":
            yield one, False
            yield other, False
        elif name in ("Quotient", "Elsewhere"):
            yield one, False
        elif name in ("Product", "Least", "Greatest"):
            for node in refs:
                yield node, False


def found_pointers(
    addresses: Iterable[int], compared: Iterable[int], nodes: Nodes, sizes: Mapping[int, int]
) -> set[int]:
    """Return the inputs that only move addresses: they are added to them, and nothing else
    depends on them.

    ``compared`` are the nodes of conditions. ``sizes`` has the bytes of each input.
    """
    added: set[int] = set()
    other: set[int] = set()
    work = [one for one in addresses if one != NONE]
    elsewhere = [*compared]
    while work:
        at = work.pop()
        if at in added:
            continue
        added.add(at)
        for child, moves in nodes.children(at):
            (work if moves else elsewhere).append(child)
    while elsewhere:
        at = elsewhere.pop()
        if at not in other:
            other.add(at)
            elsewhere += [child for child, _ in nodes.children(at)]
    needed = {nodes.parameter(at) for at in other}
    moving = {one for at in added if (one := nodes.parameter(at)) is not None} - needed
    # What a result does not depend on at all need not be compared, either.
    unused = sizes.keys() - needed - moving
    return {one for one in moving if sizes[one] == POINTER_BYTES} | unused


def roles_of_words(
    accesses: Sequence[tuple[Access, Origin]], roles: Mapping[Any, Use]
) -> dict[int | str, Use]:
    """Return the roles of pointers. A tensor map is found among whichever words there are."""
    maps = {at for access, came in accesses if access.through_map for at in came.parameters}
    found: dict[int | str, Use] = {}
    for at, use in roles.items():
        where = ANY if at in maps else at
        found[where] = use if found.get(where, use) is use else Use.BOTH
    return found
