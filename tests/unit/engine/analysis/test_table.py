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


def test_tables_of_one_module_become_one() -> None:
    alone = [table.encode(HASH, 90, [summary(name)]) for name in ("a", "b", "c")]
    assert table.merged(HASH, 90, [*alone, alone[0]]) == table.encode(
        HASH, 90, map(summary, ["a", "b", "c"])
    )
    assert table.merged(HASH, 90, [table.merged(HASH, 90, alone)]) == table.merged(HASH, 90, alone)
    for other in (HASH + 1, 90), (HASH, 80):
        with pytest.raises(Unsupported, match="no table of this module"):
            table.merged(*other, alone)


def test_what_is_no_table_is_not_merged() -> None:
    good = bytearray(table.encode(HASH, 90, [summary("a")]))
    row = table.HEADER.size
    for at in (*range(row), row, row + 8, row + 12, row + 24, row + 28, len(good) - 1):
        bad = good[:]
        bad[at] ^= 0x80
        if at not in range(36, 40):  # reserved
            with pytest.raises(Unsupported, match="no table can be made"):
                table.merged(HASH, 90, [bytes(bad)])
    for size in (0, 10, row, len(good) - 1):
        with pytest.raises(Unsupported, match="no table can be made"):
            table.merged(HASH, 90, [bytes(good[:size])])
