"""The table that the hook gets: what it holds, and what none is made of."""

from __future__ import annotations

import pytest

from phosd.engine.analysis import table, table_body, table_layout
from phosd.engine.analysis.code.cubin import Kernel
from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.summary import ANY, Summary, of_code
from phosd.errors import Unsupported
from tests.unit.engine.analysis.listing import PREPARED, code, kernel

HASH = 0xDEADBEEF
MAP = """ULDC.64 UR4,c[0x0][0x198]
UIADD3 UR6,UP0,UR4,0x40,URZ
UIADD3.X UR7,URZ,UR5,URZ,UP0,!UPT
"""
"""The address of the tensor map at 0x40 among the parameters is in UR6 and UR7."""


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


def counts(body: bytes) -> dict[str, int]:
    return dict(zip(PARTS, table_layout.BODY.unpack_from(body), strict=False))


PARTS = ("roles", "inputs", "nodes", "factors", "conditions", "keys", "loops", "accesses")


def roles(body: bytes) -> list[tuple[int, int]]:
    at = table_layout.BODY.size
    end = at + counts(body)["roles"] * table_layout.ROLE.size
    return list(table_layout.ROLE.iter_unpack(body[at:end]))


def test_a_tensor_map_is_no_pointer() -> None:
    """What is in its first bytes is no address: the hook looks for it among all words."""
    found = of_code(kernel(256), code(f"{PREPARED}{MAP}UTMASTG.2D [UR8],[UR6]\nEXIT"))
    assert found.followed is not None and found.roles == {0x40: Use.WRITTEN}
    body = table_body.encode_body(found.followed, found.accesses, found.roles)
    assert roles(body) == [(table_layout.NONE, 2)]
    assert counts(body)["inputs"] == 0
    at = table_layout.BODY.size + table_layout.ROLE.size
    access = table_layout.ACCESS.unpack_from(body, at)
    assert access[0] == table_layout.NONE and access[3] == table_layout.FROM_ANY_WORD
    assert roles(table_body.encode_roles(found.accesses, found.roles)) == [(table_layout.NONE, 2)]


def test_a_pointer_that_only_moves_ranges_is_not_compared() -> None:
    text = "IMAD.WIDE R4,R0,0x4,R2\nSTG.E [R4.64],RZ\nEXIT"
    found = of_code(kernel(), code(PREPARED + text))
    assert found.followed is not None
    body = table_body.encode_body(found.followed, found.accesses, found.roles)
    assert table_layout.BODY.unpack_from(body)[9] == 0
    text = "ISETP.GT.U32.AND P0,PT,R2,0x10,PT\n@P0 EXIT\n" + text
    found = of_code(kernel(), code(PREPARED + text))
    assert found.followed is not None
    body = table_body.encode_body(found.followed, found.accesses, found.roles)
    assert table_layout.BODY.unpack_from(body)[9] > 0


def test_what_has_no_place_is_read_and_written_anywhere() -> None:
    """A kernel of so many pointers that not even its roles fit."""
    summary = Summary(
        kernel(8 * 300), "", None, (), {8 * number: Use.READ for number in range(300)}
    )
    made = table.encode(HASH, 90, [summary])
    body_at, size = table.KERNEL.unpack_from(made, table.HEADER.size)[5:]
    assert roles(made[body_at : body_at + size]) == [
        (table_layout.NONE, table_layout.USES[Use.BOTH])
    ]
    assert ANY not in summary.roles
