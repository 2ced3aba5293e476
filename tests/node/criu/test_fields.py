"""The numbers of CRIU's fields are those of CRIU's own source."""

import inspect
import re
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest

from phosd.engine.criu.images import fields
from phosd.engine.criu.images.fields import FdTypes, RegFileEntry

PROTOS = Path(__file__).parents[3] / "build" / "criu-protos"
_BLOCK = re.compile(r"(?:message|enum)\s+(\w+)\s*\{(.*?)\n\}", re.DOTALL)
_FIELD = re.compile(
    r"^\s*(?:(?:required|optional|repeated)\s+[\w.]+\s+)?(\w+)\s*=\s*(\d+)\s*[;\[]", re.MULTILINE
)


def described(text: str) -> Iterator[tuple[str, dict[str, int]]]:
    """The messages and enumerations of a description, with their numbers by name."""
    for block in _BLOCK.finditer(text):
        yield block[1], {each[1].upper(): int(each[2]) for each in _FIELD.finditer(block[2])}


def classes() -> dict[str, type[IntEnum]]:
    """The classes by the names that CRIU has for them."""
    found = inspect.getmembers(fields, inspect.isclass)
    ours = [each for _, each in found if issubclass(each, IntEnum) and each is not IntEnum]
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", each.__name__).lower(): each for each in ours}


@pytest.mark.skipif(not PROTOS.is_dir(), reason="`make test-all` fetches CRIU's descriptions")
def test_all_numbers_are_those_of_criu() -> None:
    known = {
        name: numbers
        for path in PROTOS.glob("*.proto")
        for name, numbers in described(path.read_text())
    }
    for name, ours in classes().items():
        for field in ours:
            assert known[name].get(field.name) == field, f"{name}.{field.name}"
        (path,) = re.findall(r"``(\S+\.proto)``", ours.__doc__ or "")
        assert name in dict(described((PROTOS / path).read_text())), path


def test_descriptions_are_read() -> None:
    text = """
enum fd_types {
\tUND\t\t= 0;
\tREG\t\t= 1;
}
message reg_file_entry {
\trequired uint32\t\tid\t\t\t= 1;
\t/* = 7; */
\toptional sint32\t\tmnt_id\t\t\t= 7 [default = -1];
\trepeated uint32\t\tbuild_id\t\t= 11;
}
"""
    found = dict(described(text))
    assert found == {
        "fd_types": {"UND": 0, "REG": 1},
        "reg_file_entry": {"ID": 1, "MNT_ID": 7, "BUILD_ID": 11},
    }
    assert classes()["fd_types"] is FdTypes and classes()["reg_file_entry"] is RegFileEntry
