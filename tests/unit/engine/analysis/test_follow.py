"""What is noted of a listing's accesses, and what makes its kernel unknown."""

from __future__ import annotations

import struct

import pytest

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.provenance import Origin, origin
from phosd.engine.analysis.reference.evaluation import Evaluation, Launch
from phosd.engine.analysis.reference.ranges import Span, spans
from phosd.engine.analysis.thread.control_flow import Unknown
from phosd.engine.analysis.thread.follow import follow
from phosd.engine.analysis.thread.followed import Followed
from tests.unit.engine.analysis.listing import PREPARED, code, followed, kernel

POINTER = 0x10000


def where(found: Followed, *numbers: int) -> list[list[Span] | None]:
    """Return where each access is, of 32 threads, with the pointer and these numbers."""
    words = [POINTER, *numbers]
    fields = struct.pack("<8q", *words, *[0] * (8 - len(words)))
    launch = Launch(fields, (32, 1, 1), (1, 1, 1))
    return [spans(found, access, launch) for access in found.accesses]


def test_an_element_for_each_thread() -> None:
    found = followed(PREPARED + "IMAD.WIDE R4,R0,0x4,R2\nSTG.E desc[UR4][R4.64+0x8],RZ\nEXIT")
    assert [access.use for access in found.accesses] == [Use.WRITTEN]
    assert where(found) == [[Span(POINTER + 8, POINTER + 8 + 4 * 32)]]


@pytest.mark.parametrize(
    ("leave", "threads"),
    [
        ("ISETP.GE.AND P0,PT,R0,c[0x0][0x218],PT\n@P0 EXIT", 10),
        ("ISETP.GE.AND P0,PT,R0,c[0x0][0x218],PT\n@!P0 EXIT", 32),  # and not below 10
        ("ISETP.GE.AND P0,PT,R0,c[0x0][0x218],PT\n@P0 EXIT P1", 32),  # not all of them leave
        ("EXIT P1", 32),
        ("EXIT.NOVEL", 32),
        ("ISETP.GE.AND P0,PT,R0,0x7,PT\n@!P0 BRA.U.ANY 0x50\nEXIT", 32),
        ("ISETP.GE.AND P0,PT,R0,0x7,PT\n@!P0 BRA 0x50\nEXIT", 7),
        ("ISETP.GE.U32.AND P0,PT,R0,0x7,PT\n@P0 EXIT", 7),
        ("ISETP.GE.OR P0,PT,R0,c[0x0][0x218],P1\n@P0 EXIT", 10),
        ("ISETP.GE.AND P0,PT,R0,c[0x0][0x218],P1\n@P0 EXIT", 32),
    ],
)
def test_who_has_left_accesses_nothing(leave: str, threads: int) -> None:
    found = followed(PREPARED + leave + "\nIMAD.WIDE R4,R0,0x4,R2\nSTG.E desc[UR4][R4.64],RZ\nEXIT")
    (one,) = where(found, 10)
    assert one is not None
    assert one[-1].end == POINTER + 4 * threads


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("NOVELTY R4,R5", "instruction NOVELTY"),
        ("BRX R4,-0x40", "indirect branch"),
        ("BRA 0x4000", "branch to elsewhere"),
        ("RET.REL.NODEC R20,k", "return to elsewhere"),
        ("SETCTAID.X R4", "instruction SETCTAID"),
        ("BRA `(.L_x_1)", "branch to elsewhere"),
        ("CALL.REL.NOINC other", "call of another function"),
        ("CALL.ABS.NOINC R4", "call of a pointer"),
        ("CCTL.E.RML2 [R4]", "instruction CCTL"),
        ("@MAYBE IADD3 R4,R5,R6,RZ", "guard @MAYBE"),
    ],
)
def test_what_is_not_understood_is_named(instruction: str, reason: str) -> None:
    with pytest.raises(Unknown) as error:
        followed(f"{PREPARED}{instruction}\nEXIT")
    assert error.value.reason == reason


def test_code_that_does_not_end() -> None:
    with pytest.raises(Unknown, match="runs out of its code"):
        followed(PREPARED)


def test_a_branch_through_a_register_leads_to_where_the_cubin_says() -> None:
    store = "STG.E desc[UR4][R2.64+{0}],RZ\nEXIT\n"
    text = PREPARED + "NOP\nNOP\nBRX R8,-0x50\n" + store.format("0x4") + store.format("0x8")
    found = [one for access in where(followed(text)) for one in access or ()]
    assert sorted(found) == [Span(POINTER + 4, POINTER + 8), Span(POINTER + 8, POINTER + 12)]


CALLED = """
ISETP.LT.AND P0,PT,R0,0x7,PT
@P0 BRA 0x60
LDC.64 R4,c[0x4][{at}]
CALL.ABS.NOINC R4
STG.E desc[UR4][R2.64],RZ
EXIT
"""


def test_who_fails_an_assertion_does_not_go_on() -> None:
    found = followed(PREPARED + CALLED.format(at="0x8"))
    assert where(found) == [[Span(POINTER, POINTER + 4)]]


def test_who_has_printed_goes_on_with_anything_in_registers() -> None:
    found = followed(PREPARED + CALLED.format(at="0x10"))
    assert origin(found, found.accesses[0]).unknown
    assert where(found) == [None]


def test_where_nobody_comes_nothing_is_accessed() -> None:
    loop = "IADD3 R6,R6,0x1,RZ\nISETP.LT.AND P1,PT,R6,0x5,PT\n@P1 BRA 0x40\n"
    dead = "LDC.64 R4,c[0x4][0x8]\nCALL.ABS.NOINC R4\n" + loop
    found = followed(PREPARED + dead + "STG.E desc[UR4][R2.64],RZ\nEXIT")
    assert where(found) == []


DIVISION = """
MOV R6,0x40
CALL.REL.NOINC division
IMAD.WIDE R4,R7,0x4,R2
STG.E desc[UR4][R4.64],RZ
EXIT
MUFU.RCP R7,R0
RET.REL.NODEC R6,k
"""


def test_a_subroutine_leaves_anything_in_what_it_writes_and_no_more() -> None:
    found = followed(PREPARED + DIVISION, division=0x70)
    assert origin(found, found.accesses[0]).parameters == {0}
    assert where(found) == [None]


def test_a_subroutine_that_returns_to_elsewhere_is_refused() -> None:
    with pytest.raises(Unknown, match="return to elsewhere"):
        followed(PREPARED + DIVISION.replace("MOV R6,0x40", "MOV R6,0x50"), division=0x70)


@pytest.mark.parametrize(
    "instruction",
    [
        "LDG.E.64 R2,desc[UR4][R2.64]",
        "HMMA.16816.F32 R0,R8,R12,R4",
        "F2F.F64.F32 R2,R0",
        "SHFL.IDX PT,R2,R20,0x1f,0x1f",
        "HGMMA.64x16x16.F32 R2,gdesc[UR4],R2",
        "F2I.U64.TRUNC R2,R4",
        "I2F.F64 R2,R4",
        "@P3 LDS.128 R0,[R4]",
    ],
)
def test_a_pointer_that_was_overwritten_is_none(instruction: str) -> None:
    found = followed(PREPARED + instruction + "\nSTG.E desc[UR4][R2.64],RZ\nEXIT")
    assert origin(found, found.accesses[-1]).unknown


@pytest.mark.parametrize(
    "instruction",
    ["I2F.U64.RP R1,R4", "F2F.F32.F64 R1,R4", "F2I.F64.TRUNC R1,R4", "HMMA.1688.F16 R8,R2,R4,R8"],
)
def test_a_pointer_beside_a_result_stays(instruction: str) -> None:
    found = followed(PREPARED + instruction + "\nSTG.E desc[UR4][R2.64],RZ\nEXIT")
    assert origin(found, found.accesses[-1]).parameters == {0}


@pytest.mark.parametrize("form", ["VIMNMX.RELU R4,R0,0x7,PT", "VIADD.NOVEL R4,R0,0x1"])
def test_a_modifier_that_is_not_known_is_not_ignored(form: str) -> None:
    found = followed(f"{PREPARED}{form}\nIMAD.WIDE R4,R4,0x4,R2\nSTG.E desc[UR4][R4.64],RZ\nEXIT")
    assert where(found) == [None]


LOOP = """
MOV R6,R0
IMAD.WIDE R4,R6,0x4,R2
STG.E desc[UR4][R4.64],RZ
IADD3 R6,R6,c[0x0][0x220],RZ
ISETP.{compare}.AND P0,PT,R6,c[0x0][0x218],PT
@P0 BRA 0x30
EXIT
"""


@pytest.mark.parametrize(
    ("compare", "end", "step", "begin", "last"),
    [
        ("LT", 100, 1, 0, 99),
        ("LT", 100, 32, 0, 99),
        ("LE", 100, 7, 0, 100),
        ("GT", -10, -1, -9, 31),
        ("GE", -10, -3, -10, 31),
        ("NE", 64, 1, 0, 63),
        ("LT", -5, 1, 0, 31),  # once, before it is asked
    ],
)
def test_a_loop(compare: str, end: int, step: int, begin: int, last: int) -> None:
    found = followed(PREPARED + LOOP.format(compare=compare))
    (one,) = where(found, end, step)
    assert one == [Span(POINTER + 4 * begin, POINTER + 4 * last + 4)]


@pytest.mark.parametrize(
    ("compare", "end", "step"),
    [("LT", 100, -1), ("NE", 64, 3), ("LT", 0x7FFFFFFF, 2), ("EQ", 5, 1), ("GT", -(1 << 31), -2)],
)
def test_a_loop_that_may_wrap_has_no_end(compare: str, end: int, step: int) -> None:
    found = followed(PREPARED + LOOP.format(compare=compare))
    assert where(found, end, step) == [None]


def test_a_loop_without_a_step_stays() -> None:
    found = followed(PREPARED + LOOP.format(compare="LT"))
    assert where(found, 100, 0) == [[Span(POINTER, POINTER + 4 * 32)]]


@pytest.mark.parametrize(("end", "elements"), [(63, 61), (64, None)])
def test_a_loop_until_equal_must_meet_its_end(end: int, elements: int | None) -> None:
    text = LOOP.format(compare="NE").replace("MOV R6,R0", "MOV R6,RZ")
    (one,) = where(followed(PREPARED + text), end, 3)
    assert (elements is None) == (one is None)
    assert one is None or (one[0].begin, one[-1].end) == (POINTER, POINTER + 4 * (elements or 0))


FROM_MEMORY = """
MOV R6,RZ
LDG.E.U8 R8,desc[UR4][R2.64]
ISETP.GE.AND P1,PT,R8,0xa,PT
IMAD.WIDE R4,R6,0x4,R2
@!P1 STG.E desc[UR4][R4.64],RZ
IADD3 R6,R6,0x1,RZ
ISETP.LT.AND P0,PT,R6,R8,PT
@P0 BRA 0x30
EXIT
"""


def test_what_holds_of_a_value_does_not_hold_of_the_one_before() -> None:
    """The store knows that the value is below 10; the loop has gone on for others."""
    _, store = followed(PREPARED + FROM_MEMORY).accesses
    found = followed(PREPARED + FROM_MEMORY)
    assert store.use is Use.WRITTEN
    one = where(found)[1]
    assert one is None or one[-1].end >= POINTER + 4 * 255


SWAP = "".join(f"\nLOP3.LUT {one},R4,R5,RZ,0x3c,!PT" for one in ("R4", "R5", "R4"))


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("IADD3 R4,P0,R2,-R8,RZ\nIADD3.X R5,R3,~R9,RZ,P0,!PT", POINTER - 0x8000),
        ("IADD3 R4,P0,-R8,R2,RZ\nIMAD.X R5,R3,0x1,~R9,P0", POINTER - 0x8000),
        ("IADD3 R4,P0,R2,R8,RZ\nIMAD.X R5,R9,0x1,R3,P0", POINTER + 0x8000),
        ("UIADD3.64 R4,R2,R8,RZ", POINTER + 0x8000),
        (
            "IADD3 R6,P1,R8,R8,RZ\nIADD3 R4,P0,R6,R2,RZ\nIADD3.X R5,R3,R9,R9,P0,P1",
            POINTER + 0x10000,
        ),
        (  # as far as the number is not below 0
            "SHF.R.S32.HI R6,RZ,0x1f,R9\nLOP3.LUT R7,R6,R9,RZ,0xc0,!PT\n"
            "LOP3.LUT R6,R6,R8,RZ,0xc0,!PT\nIADD3 R4,P0,R2,R6,RZ\nIADD3.X R5,R3,R7,RZ,P0,!PT",
            POINTER,
        ),
        ("IADD3 R4,P1,P0,R2,R8,R8\nIADD3.X R5,R3,R9,R9,P1,P0", POINTER + 0x10000),
        ("LEA R4,P0,R8,R2,0x3\nLEA.HI.X R5,R8,R3,R9,0x3,P0", POINTER + 0x40000),
        ("IADD3 R4,P0,R2,-0x10,RZ\nIADD3.X R5,R3,-0x1,RZ,P0,!PT", POINTER - 0x10),
        ("LEA R4,P0,R0,R2,0x2\nLEA.HI.X.SX32 R5,R0,R3,0x2,P0", POINTER),
        ("IADD3 R4,P0,R0,R2,RZ\nLEA.HI.X.SX32 R5,R0,R3,0x1,P0", POINTER),
        ("LOP3.LUT R4,R2,0xfffffff0,RZ,0xc0,!PT\nMOV R5,R3", POINTER),
        ("LOP3.LUT R4,R2,0x2,RZ,0xc0,!PT\nIADD3 R4,R2,-R4,RZ\nMOV R5,R3", POINTER),
        ("LEA R5,P0,R8,R2,0x3\nLEA.HI.X R4,R8,R3,R9,0x3,P0" + SWAP, POINTER + 0x40000),
        ("IMAD.WIDE.U32 R4,R8,0x2,R2\nIMAD R9,R9,0x2,RZ\nIADD3 R5,R5,R9,RZ", POINTER + 0x10000),
    ],
)
def test_a_number_in_two_registers(text: str, begin: int) -> None:
    text = f"LDC.64 R8,c[0x0][0x218]\n{text}\nSTG.E desc[UR4][R4.64],RZ\nEXIT"
    (one,) = where(followed(PREPARED + text), 0x8000)
    assert one is not None
    assert one[0].begin == begin
    assert one[-1].end <= begin + 4 * 32


def test_halves_that_do_not_belong_together() -> None:
    text = "IADD3 R4,P0,R2,R0,RZ\nIADD3.X R5,R9,RZ,RZ,P0,!PT\nSTG.E desc[UR4][R4.64],RZ\nEXIT"
    assert where(followed(PREPARED + text)) == [None]


@pytest.mark.parametrize(
    ("selector", "value"),
    [
        (0x3210, 0x1234),
        (0x8880, 0x34),
        (0x9910, 0x1234),
        (0x7770, 0x34),
        (0x7771, 0x12),
        (0x7610, 0x1234),
        (0x7632, 0),
        (0x7604, 0x3400),
        (0x6410, 0x1234),
        (0x6540, 0x34),
        (0x7715, 0x1200),
        (0x7701, 0x3412),
    ],
)
def test_bytes_of_two_words(selector: int, value: int) -> None:
    text = f"LDC R6,c[0x0][0x218]\nPRMT R6,R6,{selector:#x},RZ\nIMAD.WIDE R4,R6,0x1,R2\n"
    found = followed(f"{PREPARED}{text}STG.E.U8 [R4.64],RZ\nEXIT")
    assert where(found, 0x1234) == [[Span(POINTER + value, POINTER + value + 1)]]


@pytest.mark.parametrize(
    ("extended", "value"),
    [
        ("SGXT R6,R6,0x8", 0x34),
        ("SGXT R6,R6,0x6", -0xC),
        ("SGXT.U32 R6,R6,0x6", 0x34),
        ("SGXT.W R6,R6,0x6", None),
        ("SGXT R6,R6,R7", None),
    ],
)
def test_a_number_of_so_many_bits(extended: str, value: int | None) -> None:
    text = f"LDC R6,c[0x0][0x218]\n{extended}\nIMAD.WIDE R4,R6,0x1,R2\nSTG.E.U8 [R4.64],RZ\nEXIT"
    (found,) = where(followed(PREPARED + text), 0x1234)
    at = None if value is None else POINTER + value
    assert found == (None if at is None else [Span(at, at + 1)])


@pytest.mark.parametrize(
    "load",
    [
        "LDC.S8 R6,c[0x0][0x218]",
        "LDC R6,c[0x0][0x218]\nPRMT R6,R6,0x8880,RZ",
        "LDC.S8 R6,c[0x0][0x218]\nLDC R8,c[0x0][0x220]\nIMAD.WIDE R6,R6,R8,RZ",
    ],
)
@pytest.mark.parametrize("value", [-3, 3])
def test_a_parameter_of_one_byte(load: str, value: int) -> None:
    text = f"{load}\nIMAD.WIDE R4,R6,0x1,R2\nSTG.E.U8 [R4.64],RZ\nEXIT"
    at = POINTER + value
    assert where(followed(PREPARED + text), value, 1) == [[Span(at, at + 1)]]


def test_a_sign_of_bytes() -> None:
    text = (
        "LDC R6,c[0x0][0x218]\nPRMT R6,RZ,{},R6\nIMAD.WIDE R4,R6,0x1,R2\nSTG.E.U8 [R4.64],RZ\nEXIT"
    )
    for selector, value in ((0xCCC4, -2), (0xDD54, 0x7FFE), (0xBB54, None), (0xEE54, None)):
        (found,) = where(followed(PREPARED + text.format(hex(selector))), 0x7FFE)
        at = None if value is None else POINTER + value
        assert found == (None if at is None else [Span(at, at + 1)])


@pytest.mark.parametrize(
    "form",
    [
        "STG.E desc[UR4][R4.64+UR6],RZ",
        "STG.E nothing,RZ",
        "STG [R4],RZ",
        "LDGSTS.E [R4.64],nothing",
        "LDGSTS.E [R4.64]",
        "UBLKCP.S.S [UR4],[UR6],UR8",
        "UBLKCP.S.G [UR4]",
        "UTMALDG.2D [UR4]",
    ],
)
def test_an_address_in_a_form_that_is_not_known(form: str) -> None:
    """It may be any; what else the kernel accesses is known all the same."""
    name = form.split()[0].split(".")[0]
    found = followed(f"{PREPARED}{form}\nSTG.E [R2.64],RZ\nEXIT")
    unknown, known = found.accesses
    assert origin(found, unknown).unknown == {
        "tensor map" if name == "UTMALDG" else f"address of {name}"
    }
    assert origin(found, known).parameters == {0}
    assert where(found) == [None, [Span(POINTER, POINTER + 4)]]


@pytest.mark.parametrize(
    ("form", "use", "size"),
    [
        ("UBLKCP.S.G [UR8],[UR4],UR6", Use.READ, 1024),
        ("UBLKCP.G.S [UR4],[UR8],UR6", Use.WRITTEN, 1024),
        ("UBLKRED.G.S.ADD [UR4],[UR8],UR6", Use.BOTH, 1024),
        ("UBLKCP.G.S [UR4],[UR8],UR9", Use.WRITTEN, None),
    ],
)
def test_copies_in_bulk(form: str, use: Use, size: int | None) -> None:
    found = followed(f"ULDC.64 UR4,c[0x0][0x210]\nUMOV UR6,0x40\n{form}\nEXIT")
    (access,) = found.accesses
    assert access.use is use
    assert origin(found, access).parameters == {0}
    assert where(found) == [None if size is None else [Span(POINTER, POINTER + size)]]


MAP = "ULDC.64 UR4,c[0x0][0x198]\n"


@pytest.mark.parametrize(
    ("map_", "parameters"),
    [
        ("UIADD3 UR6,UP0,UR4,0x40,URZ\nUIADD3.X UR7,URZ,UR5,URZ,UP0,!UPT", {0x40}),
        ("UMOV UR6,0x80\nUMOV UR7,URZ\nUIADD3.64 UR6,UR4,UR6,URZ", {0x80}),
        ("UMOV UR6,0x84\nUMOV UR7,URZ\nUIADD3.64 UR6,UR4,UR6,URZ", set()),  # behind the end
        ("UMOV UR6,UR4\nUMOV UR7,UR5", {0}),
        ("ULDC.64 UR6,c[0x0][0x210]", set()),  # in memory
        ("R2UR UR6,R0\nUMOV UR7,URZ\nUIADD3.64 UR6,UR4,UR6,URZ", set()),
        (
            "UISETP.NE.AND UP0,UPT,UR9,URZ,UPT\nUMOV UR6,0x40\nUSEL UR6,UR6,0x80,UP0\n"
            "UMOV UR7,URZ\nUIADD3.64 UR6,UR4,UR6,URZ",
            {0x40, 0x80},
        ),
        (
            "UISETP.NE.AND UP0,UPT,UR9,URZ,UPT\nUMOV UR6,0x40\nUSEL UR6,UR6,UR9,UP0\n"
            "UMOV UR7,URZ\nUIADD3.64 UR6,UR4,UR6,URZ",
            set(),
        ),
        ("UIADD3.64 UR6,UR4,UR4,URZ", set()),
        (
            "UISETP.NE.AND UP0,UPT,UR9,URZ,UPT\nUMOV UR6,0xfffffff0\nUSEL UR6,UR6,0x20,UP0\n"
            "UMOV UR7,URZ\nUIADD3.64 UR6,UR4,UR6,URZ\nUMOV UR8,0x20\nUMOV UR9,URZ\n"
            "UIADD3.64 UR6,UR8,UR6,URZ",
            set(),
        ),
        (
            "UISETP.NE.AND UP0,UPT,UR9,URZ,UPT\nUIADD3 UR6,UP1,UR4,0x40,URZ\n"
            "UIADD3.X UR7,URZ,UR5,URZ,UP1,!UPT\nUSEL UR6,UR6,UR4,UP0\nUSEL UR7,UR7,UR5,UP0",
            {0, 0x40},
        ),
    ],
)
@pytest.mark.parametrize(
    ("form", "use"),
    [
        ("UTMALDG.2D [UR8],[UR6],desc[UR10]", Use.READ),
        ("UTMASTG.2D [UR8],[UR6]", Use.WRITTEN),
        ("UTMAREDG.2D.ADD [UR8],[UR6]", Use.BOTH),
    ],
)
def test_tensor_maps_among_the_parameters(
    map_: str, parameters: set[int], form: str, use: Use
) -> None:
    found = follow(kernel(256), code(f"{PREPARED}{MAP}{map_}\n{form}\nEXIT"))
    (access,) = found.accesses
    came = origin(found, access)
    assert access.use is use
    assert came.parameters == parameters
    assert came.unknown == (set() if parameters else {"tensor map"})
    assert spans(found, access, Launch(bytes(256), (32, 1, 1), (1, 1, 1))) is None


ENTERED_TWICE = """MOV R6,{begin}
ISETP.NE.AND P0,PT,R8,RZ,PT
@P0 BRA 0x70
IMAD.WIDE R4,R6,0x4,R2
STG.E [R4.64],RZ
IADD3 R6,R6,0x1,RZ
ISETP.LT.AND P1,PT,R6,0x9,PT
@P1 BRA 0x50
{end}"""


def test_a_loop_that_is_entered_in_two_places() -> None:
    """In its middle: the store is left out the first time."""
    found = followed(PREPARED + ENTERED_TWICE.format(begin="0x2", end="EXIT"))
    (one,) = where(found)
    assert one is None or (one[0].begin <= POINTER + 8 and one[-1].end >= POINTER + 4 * 9)
    assert origin(found, found.accesses[0]).parameters == {0}


def test_loops_within_one_that_is_entered_in_two_places() -> None:
    """All go on: an inner loop that a thread enters in its middle, too, and one that begins the
    kernel.
    """
    text = (
        "@P0 BRA 0x40\nIADD3 R6,R6,0x1,RZ\n@P1 BRA 0x40\nSTG.E [R2.64+0x10],RZ\n"
        "STG.E [R2.64+0x20],RZ\n@P2 BRA 0x10\n@P3 BRA 0x40\n@P4 BRA 0x30\nBRA 0x0"
    )
    found = followed("LDC.64 R2,c[0x0][0x210]\nS2R R0,SR_TID.X\n" + text)
    places = [access.address.without_constant()[1] for access in found.accesses]
    assert sorted(places) == [0x10, 0x20]


HALVES = "LDC.64 R8,c[0x0][0x218]\nLDG.E R10,[R2.64]\nMOV R12,c[0x0][0x228]\n"


@pytest.mark.parametrize(
    ("text", "parameters", "unknown"),
    [
        # An upper half that was computed from indices is no pointer's.
        ("SHF.L.U32 R5,R0,0x3,RZ\nIADD3 R4,P0,R4,R2,RZ\nIADD3.X R5,R5,R3,RZ,P0,!PT", {0}, False),
        ("IMAD R5,R9,0x1,R0\nIADD3 R4,R8,0x4,RZ", {8}, False),
        ("IMAD R5,R9,0x1,R0\nIADD3 R4,R2,0x4,RZ", set(), True),
        ("IMAD R5,R9,0x1,R0\nIADD3 R4,R8,R10,RZ", {8}, True),
        ("MOV R4,R2\nIADD3 R5,R3,R10,RZ", {0}, True),
        ("MOV R4,R2\nIMAD R5,R10,R0,R3", {0}, False),  # no pointer is multiplied
        ("MOV R4,R2\nIADD3 R5,R3,R12,RZ", {0}, False),
    ],
)
def test_what_halves_were_made_from(text: str, parameters: set[int], unknown: bool) -> None:
    found = followed(f"{PREPARED}{HALVES}{text}\nSTG.E [R4.64],RZ\nEXIT")
    came = origin(found, found.accesses[-1])
    assert came.parameters == parameters
    assert bool(came.unknown) is unknown


def test_what_was_never_written_is_not_used() -> None:
    """In the first iteration R4 and R5 hold nothing, and nothing is stored there."""
    text = (
        "@!P0 BRA 0x40\nSTG.E [R4.64],RZ\nMOV R4,R2\nIMAD.IADD R5,R3,0x1,R10\n"
        "ISETP.NE.AND P0,PT,R0,RZ,PT\n@P1 BRA 0x20\nEXIT"
    )
    found = followed(f"{PREPARED}{text}")
    assert origin(found, found.accesses[-1]) == Origin(frozenset((0,)), frozenset())
    lost = followed(f"{PREPARED}STG.E [R4.64],RZ\nEXIT")
    assert origin(lost, lost.accesses[-1]).unknown == {"no pointer"}


@pytest.mark.parametrize("depth", range(4, 40))
def test_what_takes_too_much_to_describe_is_no_pointer(depth: int) -> None:
    """What is added to the pointer may be anything, however deep it is."""
    deep = "SHF.R.U32.HI R8,RZ,0x1,R8\nIADD3 R8,R8,R0,RZ\n" * depth
    text = f"MOV R8,R0\n{deep}IMAD.WIDE.U32 R4,R8,0x4,R2\nSTG.E [R4.64],RZ\nEXIT"
    found = followed(PREPARED + text)
    assert origin(found, found.accesses[-1]).parameters == {0}
    assert not origin(found, found.accesses[-1]).unknown


def test_a_product_of_long_sums_is_no_pointer() -> None:
    long = "".join(f"IMAD R8,R8,c[0x0][{at:#x}],R0\n" for at in range(0x218, 0x250, 4))
    text = f"MOV R8,R0\n{long}IMAD R4,R8,R8,R2\nMOV R5,R3\nSTG.E [R4.64],RZ\nEXIT"
    found = followed(PREPARED + text)
    assert origin(found, found.accesses[-1]) == Origin(frozenset((0,)), frozenset())
    assert where(found) == [None]


CHOSEN = """LDC R6,c[0x0][0x218]
ISETP.NE.AND P0,PT,{left},RZ,PT
@P0 BRA 0x60
LDG.E.64 R2,[R2.64]
STG.E [R2.64],RZ
EXIT"""


@pytest.mark.parametrize(("left", "decided"), [("R6", True), ("R0", False)])
def test_a_launch_decides_which_pointer_is_taken(left: str, decided: bool) -> None:
    found = followed(PREPARED + CHOSEN.format(left=left))
    store = found.accesses[-1]
    came = origin(found, store)
    assert came == Origin(frozenset((0,)), frozenset(("loaded",)), False, decided)
    for number in (0, 1):
        fields = struct.pack("<8q", POINTER, number, *[0] * 6)
        launch = Launch(fields, (32, 1, 1), (1, 1, 1))
        of_one = origin(found, store, Evaluation(found, store.facts, launch).places)
        assert bool(of_one.unknown) is not (decided and number)


@pytest.mark.parametrize(("how", "decided"), [("NE", True), ("EQ", True), ("GT", False)])
def test_a_launch_decides_whether_what_is_unknown_happens(how: str, decided: bool) -> None:
    text = f"LDC R6,c[0x0][0x218]\nISETP.{how}.AND P0,PT,R6,RZ,PT\n@P0 EXIT\n"
    found = followed(f"{PREPARED}LDG.E.64 R4,[R2.64]\n{text}STG.E [R4.64],RZ\nEXIT")
    assert origin(found, found.accesses[-1]).decided is decided


def test_addresses_that_the_loader_writes() -> None:
    text = "UMOV UR4,32@lo(0x0)\nUMOV UR5,32@hi(0x0)\nMOV R4,UR4\nMOV R5,UR5"
    found = followed(f"{PREPARED}{text}\nSTG.E [R4.64],RZ\nEXIT")
    assert origin(found, found.accesses[-1]).unknown == {"global variable"}


@pytest.mark.parametrize("instruction", ["STAS [R8.64],R0", "USETSHMSZ 0x3900"])
def test_shared_memory_does_not_count(instruction: str) -> None:
    found = followed(f"{PREPARED}{instruction}\nSTG.E [R2.64],RZ\nEXIT")
    assert where(found) == [[Span(POINTER, POINTER + 4)]]


@pytest.mark.parametrize(
    ("upper", "parameters", "unknown"),
    [
        ("MOV R5,UR4", set(), False),
        ("SEL R5,R3,UR4,P3\nSEL R4,R2,R4,P3", {0}, False),
        ("IMAD R5,R10,0x1,RZ", set(), True),
    ],
)
def test_generic_addresses_of_shared_memory(
    upper: str, parameters: set[int], unknown: bool
) -> None:
    text = f"{PREPARED}LDG.E R10,[R2.64]\nS2UR UR4,SR_SWINHI\nIADD3 R4,R10,0x20,RZ\n{upper}\n"
    found = followed(f"{text}ST.E [R4.64],RZ\nEXIT")
    came = origin(found, found.accesses[-1])
    assert came.parameters == parameters
    assert bool(came.unknown) is unknown
    assert came.is_global is (unknown or bool(parameters))


def test_a_chain_of_many_loops_is_known_or_not() -> None:
    """Each loop begins where the one before has ended."""
    loops = 600
    text = "".join(
        f"IADD3 R2,P0,R2,0x4,RZ\nIADD3.X R3,R3,RZ,RZ,P0,!PT\nIADD3 R6,R6,0x1,RZ\n"
        f"ISETP.LT.AND P1,PT,R6,0x5,PT\n@P1 BRA {hex((2 + 6 * loop) * 16)}\nMOV R6,RZ\n"
        for loop in range(loops)
    )
    found = followed(f"{PREPARED}{text}STG.E desc[UR4][R2.64],RZ\nEXIT")
    (one,) = where(found)
    assert one is None or one[-1].end >= POINTER + 4 * 5 * (loops - 1)
    assert origin(found, found.accesses[0])
