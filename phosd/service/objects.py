"""The object tree on the bus: interfaces as data, their introspection, and who may read what.

Reads answer by the caller: a *private* property (a command line) is shown to the owner of the
object and to root only, and never travels in a signal, which everybody on the bus can hear.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from phosd.bus import ROOT, Call, CallError, Connection, Variant
from phosd.engine.errors import NotAuthorized

_DBUS = "org.freedesktop.DBus"
_PROPERTIES = f"{_DBUS}.Properties"
_MANAGER = f"{_DBUS}.ObjectManager"
_INTROSPECTABLE = f"{_DBUS}.Introspectable"

Args = tuple[tuple[str, str], ...]
"""(name, D-Bus signature) of each argument."""


@dataclass(frozen=True)
class Caller:
    """Who calls. ``uid`` is what the bus vouches for."""

    uid: int

    def may_touch(self, owner: int) -> bool:
        """The owner may, and root."""
        return self.uid in (0, owner)


@dataclass(frozen=True)
class Method:
    """A method. ``run`` gets the caller, the object and the arguments; it returns the reply."""

    name: str
    takes: Args
    gives: Args
    run: Callable[..., Awaitable[list[Any]]]

    @property
    def signature(self) -> str:
        return "".join(signature for _, signature in self.takes)

    @property
    def reply_signature(self) -> str:
        return "".join(signature for _, signature in self.gives)


@dataclass(frozen=True)
class Property:
    """A read-only property, computed from the object behind it."""

    name: str
    signature: str
    read: Callable[[Any], Any]
    private: bool = False


@dataclass(frozen=True)
class Interface:
    """What an object can do, tell and announce."""

    name: str
    methods: tuple[Method, ...] = ()
    properties: tuple[Property, ...] = ()
    signals: tuple[tuple[str, Args], ...] = ()


@dataclass(frozen=True)
class Published:
    """One object on the bus: ``target`` is what its interface talks about."""

    interface: Interface
    target: Any
    owner: int

    def values(self, caller: Caller | None) -> dict[str, Variant]:
        """The properties that this caller may read; with ``None``, those that everybody may."""
        trusted = caller is not None and caller.may_touch(self.owner)
        return {
            p.name: Variant(p.signature, p.read(self.target))
            for p in self.interface.properties
            if trusted or not p.private
        }


class ObjectTree:
    """The objects below ``/org/phos``, and the answers to every call that reaches them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._objects: dict[str, Published] = {}
        connection.serve(self._answer)

    def publish(self, path: str, interface: Interface, target: Any, owner: int) -> None:
        """Put an object on the bus. ``owner`` is the uid that its private properties belong to."""
        published = self._objects[path] = Published(interface, target, owner)
        if path != ROOT:
            values = {interface.name: published.values(None)}
            self._connection.emit(ROOT, _MANAGER, "InterfacesAdded", "oa{sa{sv}}", path, values)

    def withdraw(self, path: str) -> None:
        """Take an object off the bus."""
        gone = self._objects.pop(path, None)
        if gone is not None:
            names = [gone.interface.name]
            self._connection.emit(ROOT, _MANAGER, "InterfacesRemoved", "oas", path, names)

    def replace(self, path: str, target: Any) -> None:
        """The object is described by ``target`` from now on; tells what differs."""
        old = self._objects[path]
        if old.target is target:
            return
        new = self._objects[path] = Published(old.interface, target, old.owner)
        properties = old.interface.properties
        differing = {p.name for p in properties if p.read(old.target) != p.read(target)}
        if differing:
            self._announce(path, new, differing)

    def changed(self, path: str) -> None:
        """Tell everybody what the object's properties are now."""
        published = self._objects.get(path)
        if published is not None:
            self._announce(path, published, {p.name for p in published.interface.properties})

    def signal(self, path: str, member: str, *args: Any) -> None:
        """Emit one of the signals that the object's interface declares."""
        interface = self._objects[path].interface
        takes = next(takes for name, takes in interface.signals if name == member)
        signature = "".join(part for _, part in takes)
        self._connection.emit(path, interface.name, member, signature, *args)

    def paths(self, kind: str) -> list[str]:
        """Paths of the objects of one kind, e.g. ``gpu``."""
        return sorted(path for path in self._objects if path.startswith(f"{ROOT}/{kind}/"))

    def _announce(self, path: str, published: Published, names: Iterable[str]) -> None:
        public = {n: v for n, v in published.values(None).items() if n in set(names)}
        hidden = [p.name for p in published.interface.properties if p.private and p.name in names]
        self._connection.emit(
            path,
            _PROPERTIES,
            "PropertiesChanged",
            "sa{sv}as",
            published.interface.name,
            public,
            hidden,
        )

    async def _answer(self, call: Call) -> tuple[str, list[Any]]:
        if (call.interface, call.member) == (_INTROSPECTABLE, "Introspect"):
            return "s", [self._introspect(call.path)]
        caller = Caller(await self._connection.uid_of(call.sender))
        if (call.interface, call.member, call.path) == (_MANAGER, "GetManagedObjects", ROOT):
            return "a{oa{sa{sv}}}", [self._managed(caller)]
        published = self._objects.get(call.path)
        if published is None:
            raise CallError(
                f"{_DBUS}.Error.UnknownObject",
                f"there is no object {call.path}; it may be gone, GetManagedObjects lists all",
            )
        if call.interface == _PROPERTIES:
            return self._properties(call, published, caller)
        return await self._method(call, published, caller)

    async def _method(
        self, call: Call, published: Published, caller: Caller
    ) -> tuple[str, list[Any]]:
        interface = published.interface
        method = next((m for m in interface.methods if m.name == call.member), None)
        if method is None or call.interface not in (None, interface.name):
            raise CallError(
                f"{_DBUS}.Error.UnknownMethod",
                f"{call.path} has no method {call.interface}.{call.member}",
            )
        if call.signature != method.signature:
            raise CallError(
                f"{_DBUS}.Error.InvalidArgs",
                f"{method.name} takes '{method.signature}' "
                f"({', '.join(name for name, _ in method.takes)}), not '{call.signature}'",
            )
        return method.reply_signature, await method.run(caller, published.target, *call.args)

    def _properties(
        self, call: Call, published: Published, caller: Caller
    ) -> tuple[str, list[Any]]:
        expected = {"Get": "ss", "GetAll": "s", "Set": "ssv"}.get(call.member)
        if expected is None or expected != call.signature:
            raise CallError(
                f"{_DBUS}.Error.UnknownMethod", f"no {_PROPERTIES}.{call.member}({call.signature})"
            )
        interface = published.interface
        if call.args[0] not in ("", interface.name):
            raise CallError(f"{_DBUS}.Error.UnknownInterface", f"{call.path} has no {call.args[0]}")
        values = published.values(caller)
        if call.member == "GetAll":
            return "a{sv}", [values]
        name = call.args[1]
        if name not in {p.name for p in interface.properties}:
            raise CallError(f"{_DBUS}.Error.UnknownProperty", f"{interface.name} has no {name}")
        if call.member == "Set":
            raise CallError(f"{_DBUS}.Error.PropertyReadOnly", f"{name} cannot be set")
        if name not in values:
            raise NotAuthorized(
                f"{name} of {call.path} belongs to uid {published.owner}",
                hint="ask as its owner or as root",
            )
        return "v", [values[name]]

    def _managed(self, caller: Caller) -> dict[str, dict[str, dict[str, Variant]]]:
        return {
            path: {published.interface.name: published.values(caller)}
            for path, published in self._objects.items()
            if path != ROOT
        }

    def _introspect(self, path: str) -> str:
        node = ElementTree.Element("node")
        published = self._objects.get(path)
        if published is not None:
            standard = (_STANDARD_INTROSPECTABLE, _STANDARD_PEER, _STANDARD_PROPERTIES)
            extra = (_STANDARD_MANAGER,) if path == ROOT else ()
            for interface in (*standard, *extra, published.interface):
                node.append(_describe(interface))
        prefix = path.rstrip("/") + "/"
        below = {p[len(prefix) :].split("/")[0] for p in self._objects if p.startswith(prefix)}
        for child in sorted(below):
            ElementTree.SubElement(node, "node", name=child)
        return ElementTree.tostring(node, encoding="unicode")


def _describe(interface: Interface) -> ElementTree.Element:
    element = ElementTree.Element("interface", name=interface.name)
    for method in interface.methods:
        child = ElementTree.SubElement(element, "method", name=method.name)
        for direction, args in (("in", method.takes), ("out", method.gives)):
            for name, signature in args:
                ElementTree.SubElement(child, "arg", name=name, type=signature, direction=direction)
    for member, args in interface.signals:
        child = ElementTree.SubElement(element, "signal", name=member)
        for name, signature in args:
            ElementTree.SubElement(child, "arg", name=name, type=signature)
    for p in interface.properties:
        ElementTree.SubElement(element, "property", name=p.name, type=p.signature, access="read")
    return element


async def _by_the_tree(*_: Any) -> list[Any]:
    raise AssertionError("standard interfaces are answered by the tree")


def _standard(name: str, takes: Args = (), gives: Args = ()) -> Method:
    return Method(name, takes, gives, _by_the_tree)


_STANDARD_INTROSPECTABLE = Interface(
    _INTROSPECTABLE, (_standard("Introspect", gives=(("xml_data", "s"),)),)
)
_STANDARD_PEER = Interface(
    f"{_DBUS}.Peer",
    (_standard("Ping"), _standard("GetMachineId", gives=(("machine_uuid", "s"),))),
)
_STANDARD_PROPERTIES = Interface(
    _PROPERTIES,
    (
        _standard("Get", (("interface_name", "s"), ("property_name", "s")), (("value", "v"),)),
        _standard("GetAll", (("interface_name", "s"),), (("properties", "a{sv}"),)),
        _standard("Set", (("interface_name", "s"), ("property_name", "s"), ("value", "v"))),
    ),
    signals=(
        (
            "PropertiesChanged",
            (
                ("interface_name", "s"),
                ("changed_properties", "a{sv}"),
                ("invalidated_properties", "as"),
            ),
        ),
    ),
)
_STANDARD_MANAGER = Interface(
    _MANAGER,
    (_standard("GetManagedObjects", gives=(("objects", "a{oa{sa{sv}}}"),)),),
    signals=(
        ("InterfacesAdded", (("object_path", "o"), ("interfaces_and_properties", "a{sa{sv}}"))),
        ("InterfacesRemoved", (("object_path", "o"), ("interfaces", "as"))),
    ),
)
