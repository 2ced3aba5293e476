"""Parse the operands of an instruction, as nvdisasm writes them.

``R2`` and ``UR4`` are registers, ``RZ`` and ``URZ`` zero, ``P0`` and ``UP0`` predicates, ``PT``
true; ``-`` negates, ``~`` and ``!`` invert. ``c[0x0][0x210]`` is a constant,
``desc[UR6][R2.64+0x10]`` an address, with a descriptor that says nothing of where it is.
"""

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from phosd.engine.analysis.code.disassembly import Instruction


@dataclass(frozen=True)
class Register:
    """A register; ``name`` is R2 or UR2, empty for zero. ``minus`` and ``inverted`` as it is
    written; ``plain`` is whether nothing else is: neither a part of it nor its absolute value.
    """

    name: str
    minus: bool = False
    inverted: bool = False
    plain: bool = True
    uniform: bool = False


@dataclass(frozen=True)
class Predicate:
    """A predicate; ``name`` is P0 or UP0, empty for true."""

    name: str
    inverted: bool = False


@dataclass(frozen=True)
class Immediate:
    """A number in the instruction, as its 32 bits would be extended by sign."""

    value: int


@dataclass(frozen=True)
class Real:
    """A real number in the instruction."""

    value: float


@dataclass(frozen=True)
class Constant:
    """Constant memory: ``register`` is added to ``offset``; empty for none."""

    bank: int
    offset: int
    register: str = ""
    minus: bool = False
    plain: bool = True


@dataclass(frozen=True)
class Address:
    """A memory address: the sum of registers, of which ``wide`` are the first of two, and an
    offset.
    """

    registers: tuple[str, ...]
    wide: tuple[bool, ...]
    offset: int


@dataclass(frozen=True)
class Other:
    """Anything else: a label, a barrier, a special register."""

    text: str


class NotUnderstood(Exception):
    """An instruction is written in a way that is not known."""


Operand: TypeAlias = Register | Predicate | Immediate | Real | Constant | Address | Other

_REGISTER = re.compile(r"(-?)(~?)(\|?)(U?R)(\d+|Z)((?:\.\w+)*)(\|?)")
_PREDICATE = re.compile(r"(!?)(U?P)(\d|T)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+|-?\d+")
_CONSTANT = re.compile(r"(-?)(~?)(\|?)c\[(0x[0-9a-f]+)\]\[([^\]]*)\](\|?)((?:\.\w+)*)")
_ADDRESS = re.compile(r"(?:desc\[UR\d+\])?\[([^\]]*)\]")
_ADDED = re.compile(r"(U?R)(\d+|Z)((?:\.\w+)*)")


def split(text: str) -> list[str]:
    """Return the operands, which commas divide outside of brackets."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            found.append(text[begin:at].strip())
            begin = at + 1
    last = text[begin:].strip()
    return [*found, last] if last else found


@lru_cache(maxsize=1 << 16)
def parse(text: str) -> Operand:
    """Parse one operand."""
    text = text.removesuffix(".reuse")
    if found := _REGISTER.fullmatch(text):
        minus, inverted, bar, kind, number, suffix, end = found.groups()
        name = "" if number == "Z" else kind + number
        plain = not (bar or end or suffix.removesuffix(".reuse"))
        return Register(name, bool(minus), bool(inverted), plain, kind == "UR")
    if found := _PREDICATE.fullmatch(text):
        name = "" if found[3] == "T" else found[2] + found[3]
        return Predicate(name, bool(found[1]))
    if _NUMBER.fullmatch(text):
        value = int(text, 0)
        return Immediate((value + (1 << 31)) % (1 << 32) - (1 << 31))
    if found := _CONSTANT.fullmatch(text):
        minus, inverted, bar, bank, place, end, suffix = found.groups()
        register, offset = _place(place)
        plain = not (inverted or bar or end or suffix) and offset is not None
        return Constant(int(bank, 16), offset or 0, register, bool(minus), plain)
    if (found := _ADDRESS.fullmatch(text)) and (address := _address(found[1])):
        return address
    try:
        return Real(float(text.replace("QNAN", "nan")))
    except ValueError:
        return Other(text)


def _place(text: str) -> tuple[str, int | None]:
    register, offset = "", 0
    for part in text.replace("+-", "+ -").split("+"):
        part = part.strip()
        if _NUMBER.fullmatch(part):
            offset += int(part, 0)
        elif part in ("RZ", "URZ", ""):
            continue
        elif re.fullmatch(r"U?R\d+", part) and not register:
            register = part
        else:
            return "", None
    return register, offset


def _address(text: str) -> Address | None:
    registers, wide, offset = [], [], 0
    for part in text.replace("+-", "+ -").split("+"):
        part = part.strip()
        if _NUMBER.fullmatch(part):
            offset += int(part, 0)
        elif found := _ADDED.fullmatch(part):
            suffixes = found[3].split(".")[1:]
            if any(suffix not in ("64", "U32", "reuse") for suffix in suffixes):
                return None
            if found[2] != "Z":
                registers.append(found[1] + found[2])
                wide.append("64" in suffixes)
        elif part:
            return None
    return Address(tuple(registers), tuple(wide), offset)


@lru_cache(maxsize=1 << 15)
def parse_all(text: str) -> tuple[Operand, ...]:
    """Parse all operands of an instruction."""
    return tuple(map(parse, split(text)))


@lru_cache(maxsize=1 << 12)
def parse_guard(text: str) -> Predicate | None:
    """Parse the predicate in front of an instruction, such as ``@!P0``.

    nvdisasm takes the operand ``PR`` of ``P2R``, which is all predicates, for one. That instruction
    may leave anything in its result, whether it has a guard or not.
    """
    if text in ("", "PR"):
        return None
    guard = parse(text.removeprefix("@"))
    if not isinstance(guard, Predicate):
        raise NotUnderstood(f"guard {text}")
    return guard


@lru_cache(maxsize=1 << 14)
def parse_opcode(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the opcode and its modifiers."""
    name, *modifiers = text.split(".")
    return name, tuple(modifiers)


def target(instruction: Instruction) -> int | None:
    """Return the offset that a branch names as its last operand, if it does."""
    words = split(instruction.operands)
    found = re.fullmatch(r"`?\(?(0x[0-9a-f]+)\)?", words[-1]) if words else None
    return int(found[1], 16) if found else None


def half_bits(value: float) -> int | None:
    """Return the bits of a number of half precision, if it has that."""
    try:
        return int.from_bytes(struct.pack("<e", value), "little")
    except (OverflowError, ValueError):
        return None


def registers_from(name: str, count: int) -> list[str]:
    """Return the names of ``count`` registers from this one on."""
    kind = name.rstrip("0123456789")
    first = int(name[len(kind) :])
    return [f"{kind}{first + i}" for i in range(count)]
