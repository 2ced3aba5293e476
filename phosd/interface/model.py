"""Describe an interface of D-Bus: methods with their options, properties and signals."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

Args = tuple[tuple[str, str], ...]
"""Name and D-Bus signature of each argument."""
OPTIONS = ("options", "a{sv}")
_SIGNATURES: Mapping[object, str] = {bool: "b", int: "u", float: "d", str: "s"}
_EMPTY: Mapping[str, Any] = {"b": False, "u": 0, "t": 0, "d": 0.0, "s": ""}
_PROPERTY = "property"


@dataclass(frozen=True)
class Said:
    """What is said of an option in the ``Annotated`` type of a ``TypedDict``.

    ``default`` is what a call without it means, or in words ``otherwise``; ``signature`` its type
    on the bus, where that does not follow from the Python type; ``feature`` what a phosd that knows
    it has among its ``Features``.
    """

    doc: str
    default: bool | float | str | None = None
    otherwise: str = ""
    signature: str = ""
    feature: str = ""


@dataclass(frozen=True)
class Option:
    """An option of a call, as :class:`Said`; ``choices`` are the words that it may be, if only some
    are possible.
    """

    name: str
    signature: str
    doc: str
    default: bool | float | str | None = None
    otherwise: str = ""
    choices: tuple[str, ...] = ()
    feature: str = ""


def options_of(kind: type) -> tuple[Option, ...]:
    """Return the options of a ``TypedDict``, those of its bases first."""
    found = get_type_hints(kind, include_extras=True)
    return tuple(_option(name, *get_args(hint)) for name, hint in found.items())


def _option(name: str, kind: object, said: Said) -> Option:
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    signature = said.signature or ("s" if choices else _SIGNATURES[kind])
    return Option(name, signature, said.doc, said.default, said.otherwise, choices, said.feature)


@dataclass(frozen=True)
class Method:
    """A method. ``takes`` and ``gives`` are written as ``u pid, s destination``. ``options`` is the
    ``TypedDict`` of an ``a{sv}`` at the end, and None without one. ``feature`` is as of
    :class:`Said`.
    """

    name: str
    takes: str
    gives: str
    doc: str
    options: type | None = None
    feature: str = ""

    @property
    def arguments(self) -> Args:
        """The arguments, the options among them."""
        return (*_args(self.takes), *((OPTIONS,) if self.options is not None else ()))

    @property
    def results(self) -> Args:
        return _args(self.gives)

    @property
    def signature(self) -> str:
        return "".join(signature for _, signature in self.arguments)

    @property
    def reply_signature(self) -> str:
        return "".join(signature for _, signature in self.results)


def _args(text: str) -> Args:
    pairs = (each.split() for each in text.split(",") if each)
    return tuple((name, signature) for signature, name in pairs)


@dataclass(frozen=True)
class Property:
    """A read-only property. A ``private`` one is never sent in a signal, since it is for the owner
    and administrators; a ``constant`` one does not change while its object exists.
    """

    name: str
    signature: str
    doc: str
    private: bool = False
    constant: bool = False


@dataclass(frozen=True)
class Event:
    """A signal."""

    name: str
    takes: str
    doc: str = ""

    @property
    def arguments(self) -> Args:
        return _args(self.takes)


@dataclass(frozen=True)
class Interface:
    """An interface: methods, properties and signals."""

    name: str
    doc: str = ""
    methods: tuple[Method, ...] = ()
    properties: tuple[Property, ...] = ()
    signals: tuple[Event, ...] = ()

    def method(self, name: str) -> Method:
        """Return the method with this name."""
        return next(method for method in self.methods if method.name == name)


def prop(
    name: str,
    signature: str,
    doc: str,
    *,
    private: bool = False,
    constant: bool = False,
    empty: Any = MISSING,
) -> Any:
    """Return the field of a record that holds the D-Bus property ``name``. ``empty`` is what it is
    where phosd does not tell: by default what is empty for the signature.
    """
    if empty is MISSING:
        empty = _EMPTY.get(signature, ())
    told = Property(name, signature, doc, private, constant)
    if isinstance(empty, dict):
        return field(default_factory=dict, metadata={_PROPERTY: told})
    return field(default=empty, metadata={_PROPERTY: told})


def fields_of(record: type) -> Iterator[tuple["Field[Any]", Property]]:
    """Yield the fields of a record that hold a property."""
    for each in fields(record):
        if _PROPERTY in each.metadata:
            yield each, each.metadata[_PROPERTY]


def properties_of(record: type) -> tuple[Property, ...]:
    """Return the properties that a record holds."""
    return tuple(told for _, told in fields_of(record))
