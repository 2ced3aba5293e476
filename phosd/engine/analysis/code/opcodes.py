"""What the instructions of Turing to Hopper write besides memory, and what memory they access.

An instruction that is not here is not known to write only what is taken for its results, and makes
its kernel unknown. Where it is not certain how many registers are written, more are taken: what is
in a register that was taken for written is any value, which is always right.
"""

from enum import Enum
from functools import lru_cache

from phosd.engine.analysis.code.operands import (
    Immediate,
    Operand,
    Predicate,
    Register,
    registers_from,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WITHOUT_RESULT = _names("""
BAR BPT BRA BRX BREAK BSSY BSYNC CCTL CCTLL CGAERRBAR DEPBAR ENDCOLLECTIVE ERRBAR EXIT FENCE KILL
LDGDEPBAR LDGSTS MEMBAR NANOSLEEP NOP PREEXIT RED REDG RET ST STAS STG STL STS STSM UCGABAR_ARV
UCGABAR_WAIT UTMACCTL USETSHMSZ UTMACMDFLUSH UTMAPF WARPSYNC WARPGROUP WARPGROUPSET YIELD ACQBULK
ARRIVES PMTRIG UBLKCP UBLKPF UBLKRED UTMALDG UTMAREDG UTMASTG
""")
_WITH_RESULT = _names("""
ATOM ATOMG ATOMS B2R BMOV BMSK BREV CS2R DADD DFMA DMNMX DMUL DSETP F2F F2FP F2I F2IP FADD FCHK
FFMA FLO FMNMX FMUL FRND FSEL FSET FSETP FSWZADD GETLMEMBASE HADD2 HFMA2 HMNMX2 HMUL2 HSET2
HSETP2 I2F I2FP I2I I2IP IABS IADD3 IDP IMAD IMNMX ISETP LD LDC LDG LDL LDS LDSM LEA LEPC LOP3
MATCH MOV MOVM MUFU NOP P2R PLOP3 POPC PRMT QSPC R2P R2UR REDUX S2R S2UR SEL SGXT SHF SHFL SYNCS
ELECT UBMSK UBREV UFLO UIABS UIADD3 UIMAD UIMNMX UISETP ULDC ULEA ULOP3 UMOV UP2UR UPLOP3 UPOPC
UPRMT UR2UP USEL USETMAXREG USGXT USHF VABSDIFF VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE VOTEU VHMNMX
HMMA IMMA BMMA DMMA HGMMA IGMMA QGMMA BGMMA
""")
KNOWN = _WITHOUT_RESULT | _WITH_RESULT | {"CALL"}
_ONLY_PREDICATES = _names("DSETP FCHK FSETP HSETP2 ISETP PLOP3 UISETP UPLOP3")
_DOUBLE = _names("DADD DFMA DMNMX DMUL LEPC GETLMEMBASE SYNCS")
_REALS = _names("F64 F32 F16 BF16 TF32")
_MATRIX = {"HMMA": 4, "IMMA": 4, "BMMA": 4, "DMMA": 8}
_GROUP_MATRIX = _names("HGMMA IGMMA QGMMA BGMMA")
_EVERY_PREDICATE = tuple(f"P{number}" for number in range(7))


def width(name: str, modifiers: tuple[str, ...]) -> int:
    """Return how many registers the instruction's result takes, at most."""
    if name in _GROUP_MATRIX:  # 64xNxK: N/2 of 32 bits each for a thread
        shape = next((m for m in modifiers if m.startswith("64x")), "64x256x0")
        return int(shape.split("x")[1]) // 2
    if name in _MATRIX:
        return _MATRIX[name]
    if "128" in modifiers or "4" in modifiers:
        return 4
    if name in _DOUBLE or "64" in modifiers or "WIDE" in modifiers or "2" in modifiers:
        return 2
    if name == "CS2R":
        return 1 if "32" in modifiers else 2
    return 2 if _to_double(name, modifiers) else 1


def _to_double(name: str, modifiers: tuple[str, ...]) -> bool:
    """Return whether a conversion's result has 64 bits."""
    if name == "F2I":
        return "U64" in modifiers or "S64" in modifiers
    if name == "F2F":  # the result's type comes first
        return next((one for one in modifiers if one in _REALS), "") == "F64"
    return name in ("I2F", "FRND") and "F64" in modifiers


@lru_cache(maxsize=1 << 16)
def results(
    name: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...]
) -> tuple[str, ...]:
    """Return all registers and predicates that an instruction writes, or more: the predicates in
    front, the first register, and the predicates that follow it.
    """
    if name in _WITHOUT_RESULT:
        return ()
    if name == "R2P":
        mask = operands[-1].value if operands and isinstance(operands[-1], Immediate) else -1
        return tuple(one for bit, one in enumerate(_EVERY_PREDICATE) if mask >> bit & 1)
    found: list[str] = []
    register = False
    for operand in operands:
        if isinstance(operand, Predicate):
            if operand.name:
                found.append(operand.name)
        elif isinstance(operand, Register) and not register and name not in _ONLY_PREDICATES:
            register = True
            if operand.name:
                found += registers_from(operand.name, width(name, modifiers))
        else:
            break
    return tuple(found)


class Use(Enum):
    """How an instruction uses memory."""

    READ = "read"
    WRITTEN = "written"
    BOTH = "both"


ACCESSES = {
    "LD": Use.READ,
    "LDG": Use.READ,
    "LDGSTS": Use.READ,
    "ST": Use.WRITTEN,
    "STG": Use.WRITTEN,
    "ATOM": Use.BOTH,
    "ATOMG": Use.BOTH,
    "RED": Use.BOTH,
    "REDG": Use.BOTH,
    "UBLKCP": Use.BOTH,
    "UBLKRED": Use.BOTH,
    "UTMALDG": Use.READ,
    "UTMAREDG": Use.BOTH,
    "UTMASTG": Use.WRITTEN,
}
"""Instructions that access global memory, or generic addresses, which may be of it: at most so."""
STORES = frozenset(("ST", "STG"))
"""Those that have stored, for their thread, all bytes that they may access."""


def in_order(name: str, modifiers: tuple[str, ...]) -> bool:
    """Return whether a load sees what its thread has stored before it: asynchronous copies, and
    loads through the cache for what does not change, may not.
    """
    return name[0] != "U" and name != "LDGSTS" and "CONSTANT" not in modifiers


_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_ELEMENTS = {"F16x2": 4, "BF16x2": 4, "F32": 4, "U32": 4, "S32": 4, "F64": 8, "S64": 8, "64": 8}
_LARGEST = 16


def size(name: str, modifiers: tuple[str, ...]) -> int:
    """Return how many bytes an access has, at most."""
    if ACCESSES[name] is not Use.BOTH:
        return next((_SIZES[m] for m in modifiers if m in _SIZES), 4)
    if any(m.startswith(("128", "V")) or "x4" in m or "x8" in m for m in modifiers):
        return _LARGEST
    return max((_ELEMENTS[m] for m in modifiers if m in _ELEMENTS), default=4)
