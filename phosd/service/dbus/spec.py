"""Serve the interfaces of phosd: a handler for each method, a reader for each property.

What an interface has is said in :mod:`phosd.interface`. What does not fit it is a
:class:`TypeError` when phosd starts.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from xml.etree import ElementTree

import msgspec

from phosd.errors import InvalidOption
from phosd.interface.model import Event, Interface, Method, Option, options_of
from phosd.service.dbus.bounds import misfit, types_of
from phosd.service.dbus.caller import Caller

_DBUS = "org.freedesktop.DBus"
PROPERTIES = f"{_DBUS}.Properties"
MANAGER = f"{_DBUS}.ObjectManager"
INTROSPECTABLE = f"{_DBUS}.Introspectable"
PEER = f"{_DBUS}.Peer"
_DOC = "org.gtk.GDBus.DocString"
_EMITS = f"{_DBUS}.Property.EmitsChangedSignal"

_PYTHON: Mapping[str, object] = {"u": int, "s": str, "as": list[str]}
"""Python type of a handler's parameter by D-Bus type."""
_KINDS: Mapping[type[msgspec.inspect.Type], str] = {
    msgspec.inspect.BoolType: "b",
    msgspec.inspect.IntType: "ut",
    msgspec.inspect.FloatType: "d",
    msgspec.inspect.StrType: "s",
    msgspec.inspect.LiteralType: "s",
    msgspec.inspect.EnumType: "s",
}
"""D-Bus types of an option by the type of the Struct's field."""
_DECLARED = "_dbus_method"
_WRONG = re.compile(r".+ - at `\$\.(\w+)(?:\[.*)?`", re.DOTALL)
"""What msgspec says of a value of another type, out of bounds, or that is none of the words."""

Run = Callable[..., Awaitable[list[Any]]]
"""Takes the caller, the object and the arguments of a call, and returns the values of the reply."""
Read = Callable[[Any], Any]
"""Takes the target of an object, and returns the value of a property."""
_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[object]])
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a call that takes none, and the base of all others."""


@dataclass(frozen=True)
class Served:
    """An interface with what answers its calls and reads its properties, each by its name."""

    interface: Interface
    run: Mapping[str, Run]
    read: Mapping[str, Read]


def method(name: str) -> Callable[[_Handler], _Handler]:
    """Mark an ``async`` function as the handler of the D-Bus method ``name``.

    Its parameters are the method's arguments, by the names that these have. Before them it may take
    the caller, as ``caller: Caller``, and then the target of the object. After them, a method that
    knows options takes the Struct of ``options``, which declares their bounds.
    """

    def declare(handler: _Handler) -> _Handler:
        handler.__dict__[_DECLARED] = name
        return handler

    return declare


def serve(interface: Interface, readers: Mapping[str, Read], *handlers: object) -> Served:
    """Return the interface with these ``handlers``' methods, and the ``readers`` of its properties.

    Raises :class:`TypeError` if one is missing, too many, or does not fit.
    """
    run: dict[str, Run] = {}
    stated = {each.name: each for each in interface.methods}
    for handler in handlers:
        for attribute, member in vars(type(handler)).items():
            name = getattr(member, _DECLARED, None)
            if name in stated:
                run[name] = _bound(stated[name], getattr(handler, attribute))
            elif name is not None:
                raise TypeError(f"{interface.name} has no method {name}")
    _require_same(f"handlers of {interface.name}", {*run}, {*stated})
    _require_same(
        f"readers of {interface.name}", {*readers}, {each.name for each in interface.properties}
    )
    return Served(interface, run, readers)


def _require_same(what: str, found: set[str], stated: set[str]) -> None:
    if found != stated:
        raise TypeError(f"{what} are missing or too many: {', '.join(sorted(found ^ stated))}")


def _bound(stated: Method, handler: Callable[..., Awaitable[object]]) -> Run:
    """Return what calls the handler of a method. Raises :class:`TypeError` if it does not fit."""
    parameters = list(inspect.signature(handler).parameters.values())
    options: type[msgspec.Struct] = Options
    with_options = bool(parameters) and parameters[-1].name == "options"
    if with_options:
        options = parameters.pop().annotation
    if stated.options is not None:
        require_same_options(stated.name, options, options_of(stated.options))
    elif with_options:
        raise TypeError(f"{stated.name} knows no options, and its handler takes some")
    arguments = [each for each in stated.arguments if each[0] != "options"]
    with_caller = bool(parameters) and parameters[0].annotation is Caller
    parameters = parameters[with_caller:]
    with_object = len(parameters) == len(arguments) + 1
    took = [(each.name, each.annotation) for each in parameters[with_object:]]
    if took != [(name, _PYTHON.get(kind)) for name, kind in arguments]:
        raise TypeError(f"{stated.name} takes '{stated.takes}', and its handler {took}")

    async def run(caller: Caller, target: object, *args: object) -> list[Any]:
        values = list(args)
        if stated.options is not None:
            given = parse_options(values.pop(), options)
            values += [given] * with_options
        reply = await handler(*[caller] * with_caller, *[target] * with_object, *values)
        return [reply] if stated.gives else []

    return run


def require_same_options(what: str, kind: type[msgspec.Struct], stated: tuple[Option, ...]) -> None:
    """Raise :class:`TypeError` unless the Struct has the options that are ``stated``, with their
    types, their words and their defaults, and refuses others.
    """
    if not kind.__struct_config__.forbid_unknown_fields:
        raise TypeError(f"{what} would take options that nobody knows: {kind}")
    fields = {each.name: each for each in msgspec.structs.fields(kind)}
    _require_same(f"options of {what}", {*fields}, {each.name for each in stated})
    for option in stated:
        found, choices = _type_of(kind, option.name)
        default = fields[option.name].default
        differs = option.default is not None and option.default != default
        if option.signature not in found or {*choices} != {*option.choices} or differs:
            raise TypeError(f"option {option.name} of {what} is {found} {choices} {default!r}")


def _type_of(kind: type[msgspec.Struct], name: str) -> tuple[str, list[str]]:
    """Return the D-Bus types that an option may have, and the words that it may be, if some."""
    types, choices = "", list[str]()
    for part in types_of(kind, name):
        types += _KINDS.get(type(part), "")
        if isinstance(part, msgspec.inspect.LiteralType):
            choices += map(str, part.values)
        elif isinstance(part, msgspec.inspect.EnumType):
            choices += (str(member.value) for member in part.cls)
    return types, choices


def parse_options(values: Any, kind: type[_Struct]) -> _Struct:
    """Convert and check the options of a call. Raises :class:`InvalidOption` naming the mistake."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        names = ", ".join(kind.__struct_fields__) or "none"
        hint = f"the options of this call are: {names}"
        wrong = _WRONG.fullmatch(str(error))
        if wrong is None:
            text = str(error).replace("Object contains unknown field", "there is no option")
            raise InvalidOption(text, hint=hint) from None
        name = wrong[1]
        if words := ", ".join(_type_of(kind, name)[1]):
            hint = f"{name} is one of: {words}"
            raise InvalidOption(f"{values[name]!r} is no {name}", hint=hint) from None
        hint = f"give such a value, or leave {name} out"
        raise InvalidOption(misfit(kind, name, values[name]), hint=hint) from None


def describe(interface: Interface) -> ElementTree.Element:
    """Return the interface as introspection XML."""
    element = ElementTree.Element("interface", name=interface.name)
    _annotate(element, _DOC, interface.doc)
    for method in interface.methods:
        child = ElementTree.SubElement(element, "method", name=method.name)
        _annotate(child, _DOC, _documented(method))
        for direction, args in (("in", method.arguments), ("out", method.results)):
            for name, signature in args:
                ElementTree.SubElement(child, "arg", name=name, type=signature, direction=direction)
    for signal in interface.signals:
        child = ElementTree.SubElement(element, "signal", name=signal.name)
        _annotate(child, _DOC, signal.doc)
        for name, signature in signal.arguments:
            ElementTree.SubElement(child, "arg", name=name, type=signature)
    for p in interface.properties:
        child = ElementTree.SubElement(
            element, "property", name=p.name, type=p.signature, access="read"
        )
        _annotate(child, _DOC, p.doc)
        emits = "const" if p.constant else "invalidates" if p.private else ""
        _annotate(child, _EMITS, emits)
    return element


def _documented(method: Method) -> str:
    """Return what is said of a method, with the names of its options."""
    names = [each.name for each in options_of(method.options)] if method.options else []
    return f"{method.doc} Options: {', '.join(names)}." if names else method.doc


def _annotate(element: ElementTree.Element, name: str, value: str) -> None:
    if value:
        ElementTree.SubElement(element, "annotation", name=name, value=value)


STANDARD = (
    Interface(INTROSPECTABLE, methods=(Method("Introspect", "", "s xml_data", ""),)),
    Interface(
        PEER,
        methods=(
            Method("Ping", "", "", ""),
            Method("GetMachineId", "", "s machine_uuid", ""),
        ),
    ),
    Interface(
        PROPERTIES,
        methods=(
            Method("Get", "s interface_name, s property_name", "v value", ""),
            Method("GetAll", "s interface_name", "a{sv} properties", ""),
            Method("Set", "s interface_name, s property_name, v value", "", ""),
        ),
        signals=(
            Event(
                "PropertiesChanged",
                "s interface_name, a{sv} changed_properties, as invalidated_properties",
            ),
        ),
    ),
)
"""The interfaces that every object has, which the object tree answers itself."""
OBJECT_MANAGER = Interface(
    MANAGER,
    methods=(Method("GetManagedObjects", "", "a{oa{sa{sv}}} objects", ""),),
    signals=(
        Event("InterfacesAdded", "o object_path, a{sa{sv}} interfaces_and_properties"),
        Event("InterfacesRemoved", "o object_path, as interfaces"),
    ),
)
