"""The table that the hook gets: what it holds, and what none is made of."""

from __future__ import annotations

import pytest

from phosd.engine.analysis import table
from phosd.engine.analysis.cubin import Kernel
from phosd.engine.analysis.summary import Summary
from phosd.errors import Unsupported

HASH = 0xDEADBEEF


def summary(name: str) -> Summary:
    return Summary(Kernel(name, 0x210, 16, (), {}, {}, {}), "loaded")


def test_kernels_are_in_order_and_each_is_one() -> None:
    names = ["first", "second", "twice", "third", "twice"]
    made = table.encode(HASH, 90, map(summary, names))
    *head, count, _ = table.HEADER.unpack_from(made)
    assert head == [table.MAGIC, table.VERSION, 90, HASH, len(made)]
    places = range(
        table.HEADER.size, table.HEADER.size + count * table.KERNEL.size, table.KERNEL.size
    )
    rows = [table.KERNEL.unpack_from(made, at) for at in places]
    found = [made[at : at + size].decode() for _, at, size, *_ in rows]
    assert sorted(found) == ["first", "second", "third"]
    assert [row[0] for row in rows] == sorted(table.name_hash(name.encode()) for name in found)


@pytest.mark.parametrize(
    ("module", "architecture", "names", "why"),
    [
        (0, 90, ["k"], "no module's hash"),
        (1 << 64, 90, ["k"], "no module's hash"),
        (HASH, 0, ["k"], "no architecture"),
        (HASH, 90, [], "no kernels"),
        (HASH, 90, ["k", "k"], "no kernels"),
        (HASH, 90, ["", "k" * 5000], "no kernels"),
    ],
)
def test_of_what_is_odd_none_is_made(
    module: int, architecture: int, names: list[str], why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        table.encode(module, architecture, map(summary, names))
