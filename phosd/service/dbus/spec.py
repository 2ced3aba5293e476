"""Describe D-Bus interfaces as data, collected from handlers, and generate introspection XML."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from xml.etree import ElementTree

import msgspec

from phosd.bus import complete_types
from phosd.errors import InvalidOption
from phosd.service.dbus.caller import Caller

_DBUS = "org.freedesktop.DBus"
PROPERTIES = f"{_DBUS}.Properties"
MANAGER = f"{_DBUS}.ObjectManager"
INTROSPECTABLE = f"{_DBUS}.Introspectable"
PEER = f"{_DBUS}.Peer"
_DOC = "org.gtk.GDBus.DocString"
_EMITS = f"{_DBUS}.Property.EmitsChangedSignal"

Args = tuple[tuple[str, str], ...]
"""Name and D-Bus signature of each argument."""
_OPTIONS = ("options", "a{sv}")
_PYTHON: Mapping[str, object] = {"u": int, "s": str, "as": list[str]}
"""Python type of a handler's parameter by D-Bus type."""
_DECLARED = "_dbus_method"
_NO_CHOICE = re.compile(r"Invalid enum value (.+) - at `\$\.(\w+)`", re.DOTALL)
"""What msgspec says of a word that is none of an option's."""

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[object]])
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


async def by_the_tree(*_: Any) -> list[Any]:
    """Placeholder for the methods of standard interfaces, which the object tree answers itself."""
    raise AssertionError("standard interfaces are answered by the tree")


@dataclass(frozen=True)
class Method:
    """A D-Bus method. ``run`` takes the caller, the object and the arguments, and returns the
    reply. ``options`` is the Struct of its last argument, if it takes options.
    """

    name: str
    takes: Args = ()
    gives: Args = ()
    run: Callable[..., Awaitable[list[Any]]] = by_the_tree
    doc: str = ""
    options: type[msgspec.Struct] | None = None

    @property
    def signature(self) -> str:
        return "".join(signature for _, signature in self.takes)

    @property
    def reply_signature(self) -> str:
        return "".join(signature for _, signature in self.gives)


@dataclass(frozen=True)
class Property:
    """A read-only property, computed from the target of the object.

    A private one is never sent in a signal. A constant one does not change while the object exists.
    """

    name: str
    signature: str
    doc: str
    read: Callable[[Any], Any]
    private: bool = False
    constant: bool = False


@dataclass(frozen=True)
class Event:
    """A D-Bus signal."""

    name: str
    takes: Args
    doc: str = ""


@dataclass(frozen=True)
class Interface:
    """A D-Bus interface: methods, properties and signals."""

    name: str
    doc: str = ""
    methods: tuple[Method, ...] = ()
    properties: tuple[Property, ...] = ()
    signals: tuple[Event, ...] = ()


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a call that takes none, and the base of all others."""


@dataclass(frozen=True)
class _Declared:
    """Declaration of a method, from which a handler's :class:`Method` is made."""

    name: str
    takes: Args
    gives: Args
    doc: str
    with_caller: bool
    with_object: bool
    options: type[msgspec.Struct] | None

    def of(self, handler: Callable[..., Awaitable[object]]) -> Method:
        """Return the method with this handler bound to it."""

        async def run(caller: Caller, target: object, *args: object) -> list[Any]:
            values = list(args)
            if _OPTIONS in self.takes:
                given = parse_options(values.pop(), self.options or Options)
                if self.options is not None:
                    values.append(given)
            before = [caller] * self.with_caller + [target] * self.with_object
            reply = await handler(*before, *values)
            return [reply] if self.gives else []

        return Method(self.name, self.takes, self.gives, run, self.doc, self.options)


def method(name: str, takes: str = "", /, **gives: str) -> Callable[[_Handler], _Handler]:
    """Declare an ``async`` function as the handler of the D-Bus method ``name``.

    ``takes`` is the signature of its arguments, which are named after the handler's parameters;
    ``gives`` has the name and signature of its result, if any. Before the arguments a handler may
    take the caller, as ``caller: Caller``, and then the target of the object. Options are an
    ``a{sv}`` at the end; the Struct of the parameter ``options`` declares their names, types and
    bounds. Without that parameter there are none.

    The first paragraph of the docstring becomes the documentation on the bus; ``{options}`` in it
    stands for the names of the options. Raises :class:`TypeError` for a handler that does not
    match.
    """

    def declare(handler: _Handler) -> _Handler:
        handler.__dict__[_DECLARED] = _declared(name, takes, gives, handler)
        return handler

    return declare


def _declared(
    name: str, takes: str, gives: Mapping[str, str], handler: Callable[..., Awaitable[object]]
) -> _Declared:
    parameters = list(inspect.signature(handler).parameters.values())[1:]  # without self
    types = complete_types(takes)
    options = None
    if types[-1:] == [_OPTIONS[1]]:
        types.pop()
        if parameters and parameters[-1].name == _OPTIONS[0]:
            options = _closed(name, parameters.pop().annotation)
    with_caller = bool(parameters) and parameters[0].annotation is Caller
    arguments = parameters[1:] if with_caller else parameters
    with_object = len(arguments) == len(types) + 1
    arguments = arguments[with_object:]
    if [a.annotation for a in arguments] != [_PYTHON.get(kind) for kind in types]:
        raise TypeError(f"{name} takes '{takes}', and its handler {arguments}")
    if len(gives) > 1:
        raise TypeError(f"{name} gives more than one value: give a struct")
    named = tuple((a.name, kind) for a, kind in zip(arguments, types, strict=True))
    doc = " ".join((inspect.getdoc(handler) or "").partition("\n\n")[0].split())
    if not doc:
        raise TypeError(f"{name} has no docstring, which is its documentation on the bus")
    return _Declared(
        name=name,
        takes=(*named, _OPTIONS) if takes.endswith(_OPTIONS[1]) else named,
        gives=tuple(gives.items()),
        doc=doc.replace("{options}", ", ".join((options or Options).__struct_fields__)),
        with_caller=with_caller,
        with_object=with_object,
        options=options,
    )


def _closed(name: str, kind: type) -> type[msgspec.Struct]:
    """Return the Struct. Raises :class:`TypeError` unless it refuses unknown fields."""
    if issubclass(kind, msgspec.Struct) and kind.__struct_config__.forbid_unknown_fields:
        return kind
    raise TypeError(f"{name} would take options that nobody knows: {kind}")


def methods_of(*handlers: object) -> tuple[Method, ...]:
    """Return the methods of handlers in order of definition. A class instead of an instance gives
    methods that can be described but not called.
    """
    found = []
    for handler in handlers:
        kind = handler if isinstance(handler, type) else type(handler)
        for name, member in vars(kind).items():
            declared = getattr(member, _DECLARED, None)
            if declared is not None:
                found.append(declared.of(getattr(handler, name)))
    return tuple(found)


def parse_options(values: Any, kind: type[_Struct]) -> _Struct:
    """Convert and check the options of a call. Raises :class:`InvalidOption` naming the mistake."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        if wrong := _NO_CHOICE.fullmatch(str(error)):
            value, name = wrong.groups()
            raise InvalidOption(
                f"{value} is no {name}", hint=f"{name} is one of: {', '.join(_choices(kind, name))}"
            ) from None
        names = ", ".join(kind.__struct_fields__) or "none"
        text = str(error).replace("Object contains unknown field", "there is no option")
        raise InvalidOption(text, hint=f"the options of this call are: {names}") from None


def _choices(kind: type[msgspec.Struct], name: str) -> list[str]:
    """Return what an option that is one of several words may be."""
    (field,) = (f for f in msgspec.structs.fields(kind) if f.name == name)
    found = msgspec.inspect.type_info(field.type)
    parts = found.types if isinstance(found, msgspec.inspect.UnionType) else (found,)
    choices: list[str] = []
    for part in parts:
        if isinstance(part, msgspec.inspect.LiteralType):
            choices += map(str, part.values)
        elif isinstance(part, msgspec.inspect.EnumType):
            choices += (str(member.value) for member in part.cls)
    return choices


def describe(interface: Interface) -> ElementTree.Element:
    """Return the interface as introspection XML."""
    element = ElementTree.Element("interface", name=interface.name)
    _annotate(element, _DOC, interface.doc)
    for method in interface.methods:
        child = ElementTree.SubElement(element, "method", name=method.name)
        _annotate(child, _DOC, method.doc)
        for direction, args in (("in", method.takes), ("out", method.gives)):
            for name, signature in args:
                ElementTree.SubElement(child, "arg", name=name, type=signature, direction=direction)
    for signal in interface.signals:
        child = ElementTree.SubElement(element, "signal", name=signal.name)
        _annotate(child, _DOC, signal.doc)
        for name, signature in signal.takes:
            ElementTree.SubElement(child, "arg", name=name, type=signature)
    for p in interface.properties:
        child = ElementTree.SubElement(
            element, "property", name=p.name, type=p.signature, access="read"
        )
        _annotate(child, _DOC, p.doc)
        emits = "const" if p.constant else "invalidates" if p.private else ""
        _annotate(child, _EMITS, emits)
    return element


def _annotate(element: ElementTree.Element, name: str, value: str) -> None:
    if value:
        ElementTree.SubElement(element, "annotation", name=name, value=value)


STANDARD = (
    Interface(INTROSPECTABLE, methods=(Method("Introspect", gives=(("xml_data", "s"),)),)),
    Interface(
        PEER, methods=(Method("Ping"), Method("GetMachineId", gives=(("machine_uuid", "s"),)))
    ),
    Interface(
        PROPERTIES,
        methods=(
            Method("Get", (("interface_name", "s"), ("property_name", "s")), (("value", "v"),)),
            Method("GetAll", (("interface_name", "s"),), (("properties", "a{sv}"),)),
            Method("Set", (("interface_name", "s"), ("property_name", "s"), ("value", "v"))),
        ),
        signals=(
            Event(
                "PropertiesChanged",
                (
                    ("interface_name", "s"),
                    ("changed_properties", "a{sv}"),
                    ("invalidated_properties", "as"),
                ),
            ),
        ),
    ),
)
"""The interfaces that every object has."""
OBJECT_MANAGER = Interface(
    MANAGER,
    methods=(Method("GetManagedObjects", gives=(("objects", "a{oa{sa{sv}}}"),)),),
    signals=(
        Event(
            "InterfacesAdded", (("object_path", "o"), ("interfaces_and_properties", "a{sa{sv}}"))
        ),
        Event("InterfacesRemoved", (("object_path", "o"), ("interfaces", "as"))),
    ),
)
