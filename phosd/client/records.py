"""Convert properties of phosd's objects to the records of :mod:`phosd.interface.records`.

A service of another version may send other properties: missing or mistyped ones become empty.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from phosd.interface.methods import RECORDS
from phosd.interface.model import fields_of
from phosd.interface.records import Gpu, Image, Job, Manager, Phase, Pool, Process, Record

__all__ = [
    "Gpu",
    "Image",
    "Job",
    "Manager",
    "Phase",
    "Pool",
    "Process",
    "Properties",
    "Record",
    "Values",
    "record_of",
]

Properties = Mapping[str, Any]

_T = TypeVar("_T")


class Values:
    """Typed access to the properties of an object, or to the fields of a row."""

    def __init__(self, properties: Properties, name_of: Callable[[int], str]) -> None:
        self._properties = properties
        self._name_of = name_of

    def _get(self, name: str, kind: type[_T], otherwise: _T) -> _T:
        value = self._properties.get(name)
        return value if isinstance(value, kind) else otherwise

    def figures(self, name: str) -> tuple[tuple[str, float], ...]:
        found = self._get(name, dict, {}).items()
        return tuple((key, value) for key, value in found if isinstance(value, float))

    def texts_by_key(self, name: str) -> Mapping[str, str]:
        found = self._get(name, dict, {}).items()
        return {key: value for key, value in found if isinstance(value, str)}

    def text(self, name: str) -> str:
        return self._get(name, str, "")

    def flag(self, name: str) -> bool:
        return self._get(name, bool, False)

    def whole(self, name: str) -> int:
        return self._get(name, int, 0)

    def user(self, name: str) -> str:
        """Return the name of the user whose id the property holds."""
        return self._name_of(self.whole(name))

    def number(self, name: str) -> float:
        return self._get(name, float, 0.0)

    def known(self, name: str) -> float | None:
        """Return a figure of a GPU, or None if negative: the GPU does not report it."""
        value = self._get(name, float, -1.0)
        return value if value >= 0 else None

    def time(self, name: str) -> float | None:
        return self.whole(name) / 1e6 or None

    def texts(self, name: str) -> tuple[str, ...]:
        return self.items(name, str)

    def items(self, name: str, kind: type[_T]) -> tuple[_T, ...]:
        return tuple(item for item in self._get(name, list, []) if isinstance(item, kind))

    def rows(self, name: str, row: Callable[..., _T]) -> tuple[_T, ...]:
        """Convert each row with ``row``; leave out rows that it cannot convert."""
        found = []
        for values in self._get(name, list, []):
            try:
                found.append(row(*values))
            except (TypeError, ValueError):
                continue
        return tuple(found)


def _pair(uuid: Any, chip: Any) -> tuple[str, str]:
    return str(uuid), str(chip)


def _phase(name: Any, stopped: Any, seconds: Any, done: Any, total: Any) -> Phase:
    return Phase(str(name), bool(stopped), float(seconds), int(done), int(total))


Reader = Callable[[Values, str], Any]
"""Takes the values of an object and the name of a property."""
_READERS: Mapping[str, Reader] = {
    "s": Values.text,
    "b": Values.flag,
    "u": Values.whole,
    "t": Values.whole,
    "d": Values.number,
    "as": Values.texts,
    "ao": Values.texts,
    "au": lambda values, name: values.items(name, int),
    "a{ss}": Values.texts_by_key,
    "a{sd}": Values.figures,
    "a(ss)": lambda values, name: values.rows(name, _pair),
    "a(sbdtt)": lambda values, name: values.rows(name, _phase),
}
"""How a property is read, by its signature."""
_OR_NONE: Mapping[str, Reader] = {"t": Values.time, "d": Values.known}
"""How one is read that may be unknown: a time, or a figure of a GPU."""
_DERIVED: Mapping[type[Record], Mapping[str, Callable[[Values], Any]]] = {
    Manager: {"features": lambda values: frozenset(values.texts("Features"))},
    Gpu: {},
    Pool: {"owner_name": lambda values: values.user("Owner")},
    Process: {"user_name": lambda values: values.user("User")},
    Image: {
        "owner_name": lambda values: values.user("Owner"),
        "state": lambda values: values.text("State") or "durable",  # an older phosd has no other
        "whole": lambda values: values.flag("VerifiedWhole") if values.time("Verified") else None,
    },
    Job: {
        "owner_name": lambda values: values.user("Owner"),
        "progress": lambda values: (
            values.number("Progress") if values.flag("ProgressValid") else None
        ),
    },
}
"""Fields that are not one property as it is."""


def _plain(kind: type[Record]) -> tuple[tuple[str, str, Reader], ...]:
    """Return the fields of a record that are one property each: field, property, reader."""
    return tuple(
        (
            field.name,
            told.name,
            (_OR_NONE if field.default is None else _READERS)[told.signature],
        )
        for field, told in fields_of(kind)
        if field.name not in _DERIVED[kind]
    )


_PLAIN = {kind: _plain(kind) for kind in RECORDS.values()}


def record_of(
    path: str, interface: str, properties: Properties, name_of: Callable[[int], str]
) -> Record | None:
    """Return the record of an object, or None for an interface unknown to this version.

    ``name_of`` returns the name of a user id.
    """
    kind = RECORDS.get(interface)
    if kind is None:
        return None
    values = Values(properties, name_of)
    fields = {field: read(values, name) for field, name, read in _PLAIN[kind]}
    fields |= {field: derive(values) for field, derive in _DERIVED[kind].items()}
    return kind(path, **fields)


def records_of(
    managed: Mapping[str, Mapping[str, Properties]], name_of: Callable[[int], str]
) -> dict[str, Record]:
    """Return the records of objects, by path; without those of interfaces that are unknown."""
    found = {}
    for path, interfaces in managed.items():
        for interface, values in interfaces.items():
            record = record_of(path, interface, values, name_of)
            if record is not None:
                found[path] = record
    return found
