"""Decode a cubin's machine code with nvdisasm.

Its JSON has a header with the schema's version, and the functions: of each the name, and for each
instruction the guard (``predicate``), the opcode with its modifiers and the operands, as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from phosd.engine.analysis.code.tools import Tool, how_to_get, run
from phosd.errors import Internal, Unsupported

SCHEMA = 13
"""The major version of the schema that is understood."""
INSTRUCTION_BYTES = 16
"""The size of all instructions of Volta and newer."""
OLDEST, NEWEST = 75, 90
"""The architectures whose instructions are understood: Turing to Hopper."""


class Instruction(msgspec.Struct, frozen=True):
    """One instruction: ``predicate`` is such as ``@!P0``, or empty."""

    opcode: str
    operands: str = ""
    predicate: str = ""


class Function(
    msgspec.Struct, frozen=True, rename={"name": "function-name", "code": "sass-instructions"}
):
    """The code of one section, each :data:`INSTRUCTION_BYTES` an instruction."""

    name: str
    start: int
    code: list[Instruction] = []


class _Version(msgspec.Struct):
    major: int
    minor: int


class _Sm(msgspec.Struct):
    version: _Version


class _Header(msgspec.Struct, rename={"sm": "SM", "schema": "SchemaVersion"}):
    sm: _Sm
    schema: _Version


@dataclass(frozen=True)
class Disassembly:
    """What nvdisasm made of a cubin; ``architecture`` is 90 for sm_90."""

    architecture: int
    functions: list[Function]


def disassemble(cubin: bytes, symbols: Sequence[int] = ()) -> Disassembly:
    """Decode a cubin, or the functions of some of its symbols.

    Raises :class:`Unsupported` for what nvdisasm refuses or cannot finish, and :class:`Internal`
    where nvdisasm is missing or another one.
    """
    chosen = ["--cuda-function-index", ",".join(map(str, symbols))] if symbols else []
    output = run(Tool.NVDISASM, ["--emit-json", *chosen], cubin)
    try:
        header, functions = msgspec.json.decode(output, type=tuple[_Header, list[Function]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _other(f"its output is not what it was ({error})") from error
    if header.schema.major != SCHEMA:
        raise _other(f"its schema is {header.schema.major}.{header.schema.minor}")
    architecture = header.sm.version.major * 10 + header.sm.version.minor
    if not OLDEST <= architecture <= NEWEST:
        raise Unsupported(
            f"the machine code is for sm_{architecture}",
            hint=f"kernels for sm_{OLDEST} to sm_{NEWEST} are analysed",
            reason="other-architecture",
        )
    return Disassembly(architecture, functions)


def _other(what: str) -> Internal:
    return Internal(
        f"this nvdisasm is of another version: {what}",
        hint=f"{how_to_get()} brings the one that phosd knows",
    )
