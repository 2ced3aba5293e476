"""Interfaces as data, and how they are described to whoever asks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from phosd.service.dbus.docs import DESCRIPTIONS

_DBUS = "org.freedesktop.DBus"
PROPERTIES = f"{_DBUS}.Properties"
MANAGER = f"{_DBUS}.ObjectManager"
INTROSPECTABLE = f"{_DBUS}.Introspectable"
PEER = f"{_DBUS}.Peer"
_DOC = "org.gtk.GDBus.DocString"
_EMITS = f"{_DBUS}.Property.EmitsChangedSignal"

Args = tuple[tuple[str, str], ...]
"""(name, D-Bus signature) of each argument."""


async def by_the_tree(*_: Any) -> list[Any]:
    """Stands where the tree itself answers."""
    raise AssertionError("standard interfaces are answered by the tree")


@dataclass(frozen=True)
class Method:
    """A method. ``run`` gets the caller, the object and the arguments; it returns the reply."""

    name: str
    takes: Args = ()
    gives: Args = ()
    run: Callable[..., Awaitable[list[Any]]] = by_the_tree

    @property
    def signature(self) -> str:
        return "".join(signature for _, signature in self.takes)

    @property
    def reply_signature(self) -> str:
        return "".join(signature for _, signature in self.gives)


@dataclass(frozen=True)
class Property:
    """A read-only property, computed from the object behind it.

    A private one is told to those who may read the object, never in a signal. A constant one stays
    what it is as long as the object is there.
    """

    name: str
    signature: str
    read: Callable[[Any], Any]
    private: bool = False
    constant: bool = False


@dataclass(frozen=True)
class Event:
    """A signal."""

    name: str
    takes: Args


@dataclass(frozen=True)
class Interface:
    """What an object can do, tell and announce."""

    name: str
    methods: tuple[Method, ...] = ()
    properties: tuple[Property, ...] = ()
    signals: tuple[Event, ...] = ()


def describe(interface: Interface) -> ElementTree.Element:
    """The interface as introspection tells it."""
    element = ElementTree.Element("interface", name=interface.name)
    docs = DESCRIPTIONS.get(interface.name, {})
    _annotate(element, _DOC, docs.get("", ""))
    for method in interface.methods:
        child = ElementTree.SubElement(element, "method", name=method.name)
        _annotate(child, _DOC, docs.get(method.name, ""))
        for direction, args in (("in", method.takes), ("out", method.gives)):
            for name, signature in args:
                ElementTree.SubElement(child, "arg", name=name, type=signature, direction=direction)
    for signal in interface.signals:
        child = ElementTree.SubElement(element, "signal", name=signal.name)
        _annotate(child, _DOC, docs.get(signal.name, ""))
        for name, signature in signal.takes:
            ElementTree.SubElement(child, "arg", name=name, type=signature)
    for p in interface.properties:
        child = ElementTree.SubElement(
            element, "property", name=p.name, type=p.signature, access="read"
        )
        _annotate(child, _DOC, docs.get(p.name, ""))
        emits = "const" if p.constant else "invalidates" if p.private else ""
        _annotate(child, _EMITS, emits)
    return element


def _annotate(element: ElementTree.Element, name: str, value: str) -> None:
    if value:
        ElementTree.SubElement(element, "annotation", name=name, value=value)


STANDARD = (
    Interface(INTROSPECTABLE, (Method("Introspect", gives=(("xml_data", "s"),)),)),
    Interface(PEER, (Method("Ping"), Method("GetMachineId", gives=(("machine_uuid", "s"),)))),
    Interface(
        PROPERTIES,
        (
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
"""What every object has."""
OBJECT_MANAGER = Interface(
    MANAGER,
    (Method("GetManagedObjects", gives=(("objects", "a{oa{sa{sv}}}"),)),),
    signals=(
        Event(
            "InterfacesAdded", (("object_path", "o"), ("interfaces_and_properties", "a{sa{sv}}"))
        ),
        Event("InterfacesRemoved", (("object_path", "o"), ("interfaces", "as"))),
    ),
)
