"""Whether a launch may be run again: what its threads read before they write it, and overwrite."""

from __future__ import annotations

import struct

import pytest

from phosd.engine.analysis.idempotency import Idempotent, of_kernel
from phosd.engine.analysis.reference.evaluation import Launch
from phosd.engine.analysis.reference.launch_verdict import Extent, Verdict, of_launch
from phosd.engine.analysis.summary import Summary, of_code
from tests.unit.engine.analysis.listing import PREPARED, code, kernel

A = 0x10_0000
PAST = A + 32 * 4
"""Behind what 32 threads have at A."""
B = 0x20_0000
TWO = (
    PREPARED
    + """LDC.64 R8,c[0x0][0x218]
IMAD.WIDE R4,R0,0x4,R2
IMAD.WIDE R6,R0,0x4,R8
"""
)
"""An element of the first pointer is at R4, of the second at R6."""
PREDICATE = "ISETP.GE.AND P0,PT,R0,c[0x0][0x220],PT\n"


def summary(text: str) -> Summary:
    return of_code(kernel(), code(text))


def launched(text: str, *words: int, extent: Extent | None = None) -> Verdict:
    """Return the verdict on 32 threads with these parameters."""
    fields = struct.pack("<8q", *words, *[0] * (8 - len(words)))
    return of_launch(summary(text), Launch(fields, (32, 1, 1), (1, 1, 1)), extent).verdict


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        (PAST, Verdict.IDEMPOTENT),
        (PAST - 1, Verdict.NOT),
        (A - 32 * 4, Verdict.IDEMPOTENT),
        (A - 32 * 4 + 1, Verdict.NOT),
        (A, Verdict.NOT),
    ],
)
def test_ranges_of_a_launch(second: int, verdict: Verdict) -> None:
    text = TWO + "LDG.E R9,desc[UR4][R4.64]\nSTG.E desc[UR4][R6.64],R9\nEXIT"
    assert of_kernel(summary(text)).idempotent is Idempotent.DEPENDS
    assert launched(text, A, second) is verdict


@pytest.mark.parametrize(
    ("accesses", "idempotent", "verdict"),
    [
        ("STG.E [R4.64],RZ", Idempotent.ALWAYS, Verdict.IDEMPOTENT),
        ("LDG.E R9,[R4.64]", Idempotent.ALWAYS, Verdict.IDEMPOTENT),
        ("LDG.E R9,[R4.64]\nSTG.E [R4.64],R9", Idempotent.NEVER, Verdict.NOT),
        ("LDG.E.64 R10,[R4.64]\nSTG.E [R4.64+0x4],R9", Idempotent.NEVER, Verdict.NOT),
        ("RED.E.ADD.STRONG.GPU [R4.64],R9", Idempotent.NEVER, Verdict.NOT),
        ("ATOMG.E.ADD.STRONG.GPU PT,R9,[R4.64],R9", Idempotent.NEVER, Verdict.NOT),
        ("LDG.E.64 R8,[R4.64]\nSTG.E [R8.64],R9", Idempotent.UNKNOWN, Verdict.UNKNOWN),
        ("STG.E [R4.64],R9\nLDG.E.64 R8,[R4.64]", Idempotent.DEPENDS, Verdict.NOT),
    ],
)
def test_what_a_kernel_does(accesses: str, idempotent: Idempotent, verdict: Verdict) -> None:
    text = f"{TWO}{accesses}\nEXIT"
    assert of_kernel(summary(text)).idempotent is (
        Idempotent.NEVER if idempotent is Idempotent.DEPENDS else idempotent
    )
    assert launched(text, A, B) is verdict


def test_nobody_gets_there() -> None:
    text = TWO + PREDICATE + "@P0 EXIT\nLDG.E R9,[R4.64]\nSTG.E [R4.64],R9\nEXIT"
    assert of_kernel(summary(text)).idempotent is Idempotent.NEVER
    assert launched(text, A, B, 0) is Verdict.IDEMPOTENT
    assert launched(text, A, B, 1) is Verdict.NOT


def test_the_launch_decides() -> None:
    decided = "ISETP.NE.AND P0,PT,RZ,c[0x0][0x220],PT\n@P0 EXIT\n"
    text = TWO + "STG.E [R6.64],RZ\n" + decided + "RED.E.ADD.STRONG.GPU [R4.64],R9\nEXIT"
    assert of_kernel(summary(text)).idempotent is Idempotent.DEPENDS
    assert launched(text, A, B, 1) is Verdict.IDEMPOTENT
    assert launched(text, A, B, 0) is Verdict.NOT


def test_printing() -> None:
    text = "LDC.64 R10,c[0x4][0x10]\nCALL.ABS.NOINC R10\nEXIT"
    assert of_kernel(summary(text)).why == {"prints"}
    assert launched(text) is Verdict.NOT


READ_BACK = "LDG.E.STRONG.SYS R9,[R4.64]\nEXIT"


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        ("STG.E [R4.64],RZ\n", READ_BACK, False),
        ("STG.E.64 [R4.64],RZ\n", "LDG.E.U8 R9,[R4.64+0x7]\nEXIT", False),
        ("STG.E.64 [R4.64],RZ\n", "LDG.E.U8 R9,[R4.64+0x8]\nEXIT", True),
        ("STG.E.64 [R4.64],RZ\n", "LDG.E R9,[R4.64+-0x1]\nEXIT", True),
        ("STG.E.64 [R4.64+0x8],RZ\nSTG.E.64 [R4.64],RZ\n", "LDG.E.128 R12,[R4.64]\nEXIT", False),
        ("STG.E.64 [R4.64+0x8],RZ\nSTG.E [R4.64],RZ\n", "LDG.E.128 R12,[R4.64]\nEXIT", True),
        ("STG.E.U16 [R4.64],RZ\n", READ_BACK, True),
        ("STG.E [R6.64],RZ\n", READ_BACK, True),
        ("RED.E.ADD.STRONG.GPU [R4.64],R9\n", READ_BACK, True),
        ("STG.E [R4.64],RZ\n", "LDG.E.CONSTANT R9,[R4.64]\nEXIT", True),
        (PREDICATE + "@P0 STG.E [R4.64],RZ\n", READ_BACK, True),
        (PREDICATE + "@P0 STG.E [R4.64],RZ\n", "@P0 " + READ_BACK, False),
        (PREDICATE + "@P0 STG.E [R4.64],RZ\n", "@!P0 " + READ_BACK, True),
        (PREDICATE + "@P0 STG.E [R4.64],RZ\n@!P0 EXIT\n", READ_BACK, False),
        (PREDICATE + "@P0 BRA 0x80\nSTG.E [R4.64],RZ\nNOP\n", READ_BACK, True),
        (PREDICATE + "@P0 BRA 0x90\nSTG.E [R4.64],RZ\nBRA 0xa0\nNOP\n", READ_BACK, True),
        (
            PREDICATE + "@P0 BRA 0x90\nSTG.E [R4.64],RZ\nBRA 0xa0\nSTG.E [R4.64],R8\nNOP\n",
            READ_BACK,
            False,
        ),
    ],
)
def test_what_a_thread_has_written_itself(before: str, after: str, counts: bool) -> None:
    """Only if all of the bytes were, on every way."""
    load = next(
        access
        for access in of_code(kernel(), code(TWO + before + after)).accesses
        if access[0].opcode.startswith("LDG")
    )
    assert load[0].after_write is not counts


LOOP = """{before}MOV R10,RZ
{first}{second}IADD3 R10,R10,0x1,RZ
{last}ISETP.GE.AND P1,PT,R10,0x9,PT
@!P1 BRA 0x{begin:x}
EXIT"""
STORE, LOAD = "STG.E [R4.64],RZ\n", "LDG.E R9,[R4.64]\n"
NEXT = "IADD3 R4,P2,R4,0x4,RZ\nIMAD.X R5,RZ,RZ,R5,P2\n"


@pytest.mark.parametrize(
    ("before", "first", "second", "last", "counts"),
    [
        (STORE, LOAD, "", "", False),  # always the same element
        ("", STORE, LOAD, "", False),
        ("", LOAD, STORE, "", True),  # the first time it has not been written
        (STORE, LOAD, "", NEXT, True),  # the second time it is another
        ("", STORE, LOAD, NEXT, False),
        ("", STORE, NEXT, LOAD, True),
        ("", STORE, "IMAD.WIDE R4,R10,0x4,R2\n", LOAD, True),
    ],
)
def test_loops(before: str, first: str, second: str, last: str, counts: bool) -> None:
    begin = 16 * len(code(TWO + before + "MOV R10,RZ"))
    text = TWO + LOOP.format(before=before, first=first, second=second, last=last, begin=begin)
    load = next(one for one, _ in summary(text).accesses if one.opcode.startswith("LDG"))
    assert load.after_write is not counts


FIELDS = """IMAD.WIDE R4,R0,{row},R2
IMAD.WIDE R6,R0,{row},R8
"""


@pytest.mark.parametrize(
    ("row", "second", "verdict"),
    [
        (8, A + 4, Verdict.IDEMPOTENT),
        (8, A + 12, Verdict.IDEMPOTENT),
        (8, A - 4, Verdict.IDEMPOTENT),
        (8, A + 3, Verdict.NOT),
        (8, A + 5, Verdict.NOT),
        (7, A + 4, Verdict.NOT),
        (8, A + 8, Verdict.NOT),
    ],
)
def test_fields_between_one_another(row: int, second: int, verdict: Verdict) -> None:
    text = TWO + FIELDS.format(row=row) + "LDG.E R9,[R4.64]\nSTG.E [R6.64],R9\nEXIT"
    assert launched(text, A, second) is verdict


@pytest.mark.parametrize(("columns", "verdict"), [(32, Verdict.IDEMPOTENT), (33, Verdict.NOT)])
def test_columns_of_a_matrix(columns: int, verdict: Verdict) -> None:
    """Rows of 256 bytes, a block for each: threads read the first half, and write the second."""
    text = (
        TWO
        + f"""S2R R12,SR_CTAID.X
ISETP.GE.AND P0,PT,R0,{columns},PT
@P0 EXIT
IMAD.WIDE R4,R12,0x100,R4
IMAD.WIDE R6,R12,0x100,R6
LDG.E R9,[R4.64]
STG.E [R6.64+0x80],R9
EXIT"""
    )
    fields = struct.pack("<8q", A, A, *[0] * 6)
    assert of_launch(summary(text), Launch(fields, (64, 1, 1), (9, 1, 1))).verdict is verdict


def allocated(*blocks: tuple[int, int]) -> Extent:
    return lambda at: next((one for one in blocks if one[0] <= at < one[1]), None)


@pytest.mark.parametrize(
    ("second", "third", "blocks", "verdict"),
    [
        (B, 8, [(A, PAST), (B, B + 64)], Verdict.IDEMPOTENT),
        (B, 8, [(A, B + 64)], Verdict.UNKNOWN),  # in one allocation
        (B, 8, [(A, PAST)], Verdict.UNKNOWN),  # who knows whose memory that is
        (B, B + 64, [(A, PAST), (B, B + 64)], Verdict.UNKNOWN),
        (B, -8, [(A, PAST), (B, B + 64)], Verdict.IDEMPOTENT),
        (A, 8, [(A, PAST)], Verdict.UNKNOWN),
    ],
)
def test_roles_alone(
    second: int, third: int, blocks: list[tuple[int, int]], verdict: Verdict
) -> None:
    """An index comes from memory: its pointer's allocation is all that is known."""
    text = TWO + (
        "LDC.64 R16,c[0x0][0x220]\nIADD3 R8,P0,R8,R16,RZ\nIMAD.X R9,R9,0x1,R17,P0\n"
        "LDG.E R14,[R4.64]\nIMAD.WIDE R8,R14,0x4,R8\nSTG.E [R8.64],R14\nEXIT"
    )
    assert of_kernel(summary(text)).idempotent is Idempotent.DEPENDS
    assert launched(text, A, second, third, extent=allocated(*blocks)) is verdict
    assert launched(text, A, second, third) is Verdict.UNKNOWN
