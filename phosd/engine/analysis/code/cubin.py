"""Read what a cubin tells of its kernels besides their code: parameters and symbols.

A cubin is a 64-bit ELF file. What NVIDIA adds to it is not documented: sections ``.nv.info.KERNEL``
hold records of an attribute's number and its value, of which these are read:

- 0x0a ``PARAM_CBANK``: where in constant bank 0 the parameters begin;
- 0x17 and 0x45 ``KPARAM_INFO``: ordinal, offset and size of one parameter. The format tells no
  types: neither what is a pointer nor what is const.
- 0x19 ``CBANK_PARAM_SIZE``: the size of all of them;
- 0x34 ``INDIRECT_BRANCH_TARGETS``: the offset of a branch through a register, 0, how many targets
  it has, and the offset of each.
"""

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from phosd.errors import Unsupported

MAX_BYTES = 512 << 20
_MAX_SECTIONS = 1 << 18
_MAX_PARAMETERS = 4096
_MAX_PARAMETER_BYTES = 32764
"""The largest parameter buffer of CUDA 12.1 and newer."""

_SYMBOLS, _RELOCATIONS = 2, 4  # SHT_SYMTAB, SHT_RELA
_FUNCTION = 2  # STT_FUNC
_INFO = ".nv.info."
_PARAM_CBANK, _KPARAM_INFO, _CBANK_PARAM_SIZE, _KPARAM_INFO_V2 = 0x0A, 0x17, 0x19, 0x45
_INDIRECT_BRANCH_TARGETS = 0x34
_LONG_VALUE = 4  # EIFMT_SVAL: the value follows the record, otherwise it is in it


@dataclass(frozen=True)
class Parameter:
    """One parameter: ``offset`` in the parameter buffer and ``size``, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """A kernel's parameters, by offset. ``base`` is where the buffer begins in bank 0, and
    ``size`` its bytes. ``subroutines`` has the offset of each function within the kernel's code;
    ``addresses`` whose address is at each offset of constant bank 4; ``branches`` where each branch
    through a register leads to, by its offset.
    """

    name: str
    base: int
    size: int
    parameters: tuple[Parameter, ...]
    subroutines: dict[str, int]
    addresses: dict[int, str]
    branches: dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes


def read(image: bytes) -> dict[str, Kernel]:
    """Return the kernels of a cubin by name. Raises :class:`Unsupported` for what is none."""
    try:
        sections = _sections(image)
        code = {section.name[6:] for section in sections if section.name.startswith(".text.")}
        functions, addresses = _functions(sections), _addresses(sections)
        return {
            name: _kernel(name, section.data, functions.get(name, {}), addresses)
            for section in sections
            if section.name.startswith(_INFO)
            and (name := section.name[len(_INFO) :]) in code
            and any(number == _PARAM_CBANK for number, _ in _attributes(section.data))
        }
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise _damaged(str(error)) from error


def symbols_of(image: bytes, names: Collection[str]) -> list[int]:
    """Return the numbers of the symbols of these kernels. Raises as :func:`read`."""
    try:
        symbols = enumerate(_symbols(_sections(image)))
        return [at for at, (name, info, *_) in symbols if info & 15 == _FUNCTION and name in names]
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _damaged(str(error)) from error


def _damaged(what: str) -> Unsupported:
    return Unsupported(
        f"the cubin is damaged: {what}",
        hint="its kernels count as writing everywhere; compile it again, then phosd analyses them",
        reason="unreadable-module",
    )


def _sections(image: bytes) -> list[_Section]:
    if len(image) > MAX_BYTES or image[:6] != b"\x7fELF\x02\x01":
        raise _damaged(f"{len(image)} bytes that are no 64-bit ELF file of at most {MAX_BYTES}")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<3H", image, 0x3A)
    if size != 64:
        raise _damaged(f"its section headers have {size} bytes")
    if count == 0:  # more than 65,279: the first header has the numbers
        (count,) = struct.unpack_from("<Q", image, table + 0x20)
    if names == 0xFFFF:
        (names,) = struct.unpack_from("<I", image, table + 0x28)
    if count > _MAX_SECTIONS:
        raise _damaged(f"it has {count} sections")
    headers = [struct.unpack_from("<2I4Q2I2Q", image, table + i * 64) for i in range(count)]
    _, kind, _, _, at, length, *_ = headers[names]
    strings = image[at : at + length]
    found = []
    for name, kind, _, _, at, length, *_ in headers:
        data = b"" if kind == 8 else image[at : at + length]  # SHT_NOBITS
        found.append(_Section(_string(strings, name), kind, data))
    return found


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode() if at < len(strings) else ""


def _functions(sections: list[_Section]) -> dict[str, dict[str, int]]:
    """Return the offsets of the functions in each section of code, by the section's kernel."""
    found: dict[str, dict[str, int]] = {}
    for name, info, index, value in _symbols(sections):
        if info & 15 == _FUNCTION and index < len(sections):
            inside = sections[index].name.removeprefix(".text.")
            found.setdefault(inside, {})[name] = value
    return found


def _symbols(sections: list[_Section]) -> list[tuple[str, int, int, int]]:
    """Return name, info, section and value of each symbol."""
    strings = next((section.data for section in sections if section.name == ".strtab"), b"")
    data = next((section.data for section in sections if section.kind == _SYMBOLS), b"")
    entries = struct.iter_unpack("<IBBHQQ", data[: len(data) // 24 * 24])
    return [(_string(strings, name), info, at, value) for name, info, _, at, value, _ in entries]


def _addresses(sections: list[_Section]) -> dict[int, str]:
    """Return whose address the loader writes to each offset of constant bank 4."""
    found = {}
    symbols = _symbols(sections)
    for section in sections:
        if section.kind == _RELOCATIONS and section.name == ".rela.nv.constant4":
            whole = len(section.data) // 24 * 24
            for offset, info, _ in struct.iter_unpack("<QQq", section.data[:whole]):
                found[offset] = symbols[info >> 32][0]
    return found


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, number, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _LONG_VALUE:
            yield number, data[at : at + value]
            at += value
        else:
            yield number, struct.pack("<H", value)


def _kernel(
    name: str, data: bytes, subroutines: dict[str, int], addresses: dict[int, str]
) -> Kernel:
    base = size = 0
    parameters = []
    branches: dict[int, tuple[int, ...]] = {}
    for number, value in _attributes(data):
        if number == _PARAM_CBANK:
            _, base, _ = struct.unpack("<IHH", value)
        elif number == _CBANK_PARAM_SIZE:
            (size,) = struct.unpack("<H", value[:2])
        elif number in (_KPARAM_INFO, _KPARAM_INFO_V2):
            _, _, offset, rest = struct.unpack_from("<IHHI", value)
            parameters.append(Parameter(offset, rest >> 18))
        elif number == _INDIRECT_BRANCH_TARGETS:
            branches |= _branches(value)
    parameters.sort(key=lambda parameter: parameter.offset)
    ends = [parameter.offset + parameter.size for parameter in parameters]
    fits = size <= _MAX_PARAMETER_BYTES and len(parameters) <= _MAX_PARAMETERS
    if not fits or max(ends, default=0) > size:
        raise _damaged(f"the parameters of {name} exceed their {size} bytes")
    return Kernel(name, base, size, tuple(parameters), subroutines, addresses, branches)


def _branches(value: bytes) -> dict[int, tuple[int, ...]]:
    found = {}
    at = 0
    while at < len(value):
        branch, _, count = struct.unpack_from("<3I", value, at)
        found[branch] = struct.unpack_from(f"<{min(count, len(value))}I", value, at + 12)
        at += 12 + 4 * count
    return found
