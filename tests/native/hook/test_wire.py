"""The messages of the hook, in Python and in the header that the hook is built with."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

from phosd.engine.analysis import table, table_layout
from phosd.engine.hook_client import wire
from phosd.engine.hook_client.link import HookState
from phosd.engine.hook_client.wire import Ask, BlockFlag, ProgramOutcome, Release, Status, Type

PROTOCOL = Path(__file__).parents[3] / "phosd/hook/protocol"
WIRE, SUMMARIES = PROTOCOL / "wire.h", PROTOCOL / "summaries.h"


def test_layouts_are_those_of_the_header(tmp_path: Path) -> None:
    """A C++ program prints every size and offset; Python's structs must have the same."""
    structs = {
        "Header": (
            wire.HEADER,
            ("magic", "version", "type", "sequence", "status", "length", "descriptors"),
        ),
        "Hello": (
            wire.HELLO,
            (
                *("pid", "driver_version", "devices", "state", "parkable", "ever_parked"),
                *("uses_unsupported", "never_stopped", "reason"),
            ),
        ),
        "DeviceId": (wire.DEVICE_ID, ("uuid",)),
        "Block": (wire.BLOCK, ("id", "va", "size", "device", "flags")),
        "BlockList": (wire.BLOCK_LIST, ("count", "more", "freed", "last_id")),
        "CloseGate": (wire.CLOSE_GATE, ("deadline_ms", "slice_us", "for_peers")),
        "GateState": (
            wire.GATE_STATE,
            ("settled", "busy", "waiting", "capturing", "admitted", "last_id", "freed"),
        ),
        "Arm": (wire.ARM, ("slabs", "reserved")),
        "KernelList": (wire.ROW_LIST, ("count", "more")),
        "Kernel": (wire.KERNEL, ("module", "launches", "flags", "length")),
        "LaunchesAsk": (wire.LAUNCHES_ASK, ("after", "seconds", "reserved")),
        "LaunchedKernel": (
            wire.LAUNCHED_KERNEL,
            (
                *("module", "launches", "idempotent", "overwrites", "flags", "summary"),
                *("reserved", "length"),
            ),
        ),
        "ImageList": (wire.ROW_LIST, ("count", "more")),
        "Image": (wire.IMAGE, ("hash", "address", "size", "held", "length")),
        "EmptyCache": (wire.EMPTY_CACHE, ("ask", "reserved")),
        "ReleaseState": (wire.RELEASE_STATE, ("release", "reserved", "reason")),
        "ProgramAsk": (
            wire.PROGRAM_ASK,
            ("ask", "outcome", "then", "reserved", "wish", "text"),
        ),
        "ProgramState": (
            wire.PROGRAM_STATE,
            ("declared", "waiting", "refused", "reserved", "wish", "reason"),
        ),
        "ProgramWish": (wire.PROGRAM_WISH, ("wish", "then", "name_size")),
        "Cursor": (wire.U64, ("after",)),
        "Count": (wire.U64, ("count",)),
    }
    compare(WIRE, "wire", structs, tmp_path)


def test_layouts_of_tables_are_those_of_the_header(tmp_path: Path) -> None:
    of_access = struct.Struct("<IIBBH8s8s8s8s8s")
    assert of_access.size == table_layout.ACCESS.size
    structs = {
        "Header": (
            table.HEADER,
            ("magic", "version", "architecture", "module", "size", "kernel_count", "reserved"),
        ),
        "Kernel": (
            table.KERNEL,
            (
                *("name_hash", "name_at", "name_size", "flags", "parameter_bytes"),
                *("body_at", "body_size"),
            ),
        ),
        "Body": (
            struct.Struct("<10I8s"),
            (
                *("roles", "inputs", "nodes", "factors", "conditions", "keys", "loops"),
                *("accesses", "refs", "compared", "reserved"),
            ),
        ),
        "Role": (table_layout.ROLE, ("input", "use")),
        "Input": (table_layout.INPUT, ("offset", "size")),
        "Node": (
            table_layout.NODE,
            ("kind", "bits", "count", "one", "at", "other", "low", "high"),
        ),
        "Factor": (table_layout.FACTOR, ("factor", "node", "reserved")),
        "Condition": (
            table_layout.CONDITION,
            (
                *("how", "is_signed", "width", "one", "other", "word_of_one", "word_of_other"),
                "reserved",
            ),
        ),
        "Key": (table_layout.KEY, ("kind", "at", "count", "reserved")),
        "Loop": (table_layout.LOOP, ("at", "count")),
        "List": (table_layout.LOOP, ("at", "count")),
        "Access": (
            of_access,
            (
                *("address", "size", "use", "flags", "reserved", "facts", "decided", "choices"),
                *("loops", "origins"),
            ),
        ),
    }
    compare(SUMMARIES, "table", structs, tmp_path)


def compare(
    header: Path,
    namespace: str,
    structs: dict[str, tuple[struct.Struct, tuple[str, ...]]],
    tmp_path: Path,
) -> None:
    declared = dict(re.findall(r"^struct (\w+) \{(.*?)^\};", header.read_text(), re.M | re.S))
    assert declared.keys() == structs.keys()
    program = f'#include <cstdio>\n#include "{header}"\nusing namespace phos::{namespace};\n'
    program += "int main() {\n"
    expected = []
    for name, (layout, fields) in structs.items():
        names = re.findall(r"^\s*\w+ (\w+)(?:\[\d+\])?;", declared[name], re.M)
        assert tuple(names) == fields, name
        program += f'std::printf("%zu\\n", sizeof({name}));\n'
        expected.append(layout.size)
        for field, offset in zip(fields, offsets(layout), strict=True):
            program += f'std::printf("%zu\\n", offsetof({name}, {field}));\n'
            expected.append(offset)
    source = tmp_path / "layouts.cpp"
    source.write_text(program + "}\n")
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the native build needs a C++ compiler, and so does this test"
    subprocess.run([compiler, "-std=c++17", source, "-o", tmp_path / "layouts"], check=True)
    printed = subprocess.run([tmp_path / "layouts"], capture_output=True, check=True).stdout
    assert [int(line) for line in printed.split()] == expected


def offsets(layout: struct.Struct) -> list[int]:
    """Where each field begins: what comes before it, with the same (no) padding."""
    codes = re.findall(r"\d*[a-zA-Z]", layout.format.removeprefix("<"))
    single = [c for code in codes for c in ([code] if "s" in code else expand(code))]
    return [struct.calcsize("<" + "".join(single[:n])) for n in range(len(single))]


def expand(code: str) -> list[str]:
    return [code[-1]] * int(code[:-1] or 1)


def test_numbers_are_those_of_the_header() -> None:
    text = WIRE.read_text()
    constants = dict(re.findall(r"constexpr \w+ k(\w+) = ([^;]+);", text))
    assert {name: value(number) for name, number in constants.items()} == {
        "Magic": wire.MAGIC,
        "Version": wire.VERSION,
        "Reply": wire.REPLY,
        "MaxPayload": wire.MAX_PAYLOAD,
        "MaxDescriptors": wire.MAX_DESCRIPTORS,
        "MaxName": wire.MAX_NAME,
    }
    assert members(text, "enum class Type") == {t.name.lower(): t.value for t in Type}
    assert members(text, "enum class Status") == {s.name.lower(): s.value for s in Status}
    assert members(text, "enum class State") == {s.name.lower(): s.value for s in HookState}
    assert members(text, "enum class Release") == {r.name.lower(): r.value for r in Release}
    assert members(text, "enum class Ask") == {a.name.lower(): a.value for a in Ask}
    assert ("kAnalysed = 0x100," in text, "kGuessed = 0x200," in text) == (
        wire.ANALYSED == 0x100,
        wire.GUESSED == 0x200,
    )
    flags = {name.removeprefix("k"): n for name, n in members(text, "enum BlockFlags").items()}
    assert flags == {(f.name or "").title().replace("_", ""): f.value for f in BlockFlag}


def test_numbers_of_tables_are_those_of_the_header() -> None:
    text = SUMMARIES.read_text()
    constants = dict(re.findall(r"constexpr \w+ k(\w+) = ([^;]+);", text))
    assert {name: value(number) for name, number in constants.items()} == {
        "Magic": table.MAGIC,
        "Version": table.VERSION,
        "MaxKernels": table.MAX_KERNELS,
        "MaxBytes": table.MAX_BYTES,
        "MaxName": table.MAX_NAME,
        "MaxInputs": table_layout.MAX_INPUTS,
        "MaxNodes": table_layout.MAX_NODES,
        "MaxAccesses": table_layout.MAX_ACCESSES,
        "MaxRefs": table_layout.MAX_REFS,
        "None": table_layout.NONE,
    }
    assert members(text, "enum KernelFlags") == {
        "kReadsKnown": table.READS_KNOWN,
        "kWritesKnown": table.WRITES_KNOWN,
        "kRangesRead": table.RANGES_READ,
        "kRangesWritten": table.RANGES_WRITTEN,
        "kAccesses": table.ACCESSES,
        "kPrints": table.PRINTS,
        "kOverwritesNothing": table.OVERWRITES_NOTHING,
    }
    assert members(text, "enum AccessFlags") == {
        "kUnknownOrigin": table_layout.UNKNOWN_ORIGIN,
        "kFromAnyWord": table_layout.FROM_ANY_WORD,
    }
    assert counted(text, "enum NodeKind") == [f"k{name}" for name in table_layout.NODE_KINDS]
    assert counted(text, "enum KeyKind") == [f"k{k.title()}" for k in table_layout.KEY_KINDS]
    hows = dict(zip(counted(text, "enum How"), table_layout.HOWS, strict=True))
    assert hows == {
        "kNever": "NEVER",
        "kAlways": "ALWAYS",
        "kLess": "LT",
        "kNotMore": "LE",
        "kMore": "GT",
        "kNotLess": "GE",
        "kEqual": "EQ",
        "kUnequal": "NE",
    }


def test_outcomes_are_those_of_the_header_for_programs() -> None:
    text = (WIRE.parents[2] / "include/phos.h").read_text()
    numbers = dict(re.findall(r"PHOS_(\w+) = (-?\d+),", text))
    assert {o.name: str(o.value) for o in ProgramOutcome}.items() <= numbers.items()
    assert [numbers[then.upper()] for then in wire.THENS] == ["0", "1", "2"]


def value(text: str) -> int:
    """A constant, as C++ writes it."""
    first, _, shift = text.partition("<<")
    return int(first.strip().rstrip("ul").replace("'", ""), 0) << int(shift or 0)


def members(text: str, start: str) -> dict[str, int]:
    """The members of an enum: name -> number."""
    found = re.search(rf"^{start} : \w+ \{{(.*?)^\}};", text, re.M | re.S)
    assert found, start
    numbers: dict[str, int] = {}
    for name, number in re.findall(r"^\s*(\w+)(?: = (\d+))?,", found[1], re.M):
        numbers[name] = int(number) if number else max(numbers.values()) + 1
    return numbers


def counted(text: str, start: str) -> list[str]:
    """The members of an enum that begins at 0."""
    found = re.search(rf"^{start} : \w+ \{{(.*?)\}};", text, re.M | re.S)
    assert found, start
    return re.findall(r"\bk[A-Z]\w*", re.sub(r"//.*", "", found[1]))
