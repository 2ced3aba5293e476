"""Publish objects on the bus and decide which callers may read them.

Only its owner and administrators may read an object that has an owner. Everybody on the bus
receives signals, so a *private* property (a command line) is never sent in one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from phosd.bus import ROOT, Call, CallError, Connection, Variant, key_of
from phosd.errors import NotAuthorized
from phosd.interface.model import Interface, Method
from phosd.service.dbus.call_queue import CallQueue
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.spec import (
    INTROSPECTABLE,
    MANAGER,
    OBJECT_MANAGER,
    PEER,
    PROPERTIES,
    STANDARD,
    Served,
    describe,
)

_ERROR = "org.freedesktop.DBus.Error"
_SLICE = 50
"""Objects to describe before yielding to the event loop."""

Inspects = Callable[[Caller], Awaitable[bool]]
"""Whether a caller may read other users' objects."""


@dataclass
class Published:
    """One object on the bus; what is ``served`` reads its properties from ``target``.

    Only the owner and administrators may read it. Without an owner everybody may, except private
    properties. ``told`` has the values as of the last signal.
    """

    served: Served
    target: Any
    owner: int | None
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def interface(self) -> Interface:
        return self.served.interface

    def read(self) -> dict[str, Any]:
        """Return the present values of the properties."""
        return {name: read(self.target) for name, read in self.served.read.items()}

    def values(self, *, private: bool = True) -> dict[str, Variant]:
        """Return the properties as D-Bus variants, optionally without the private ones."""
        return {
            p.name: Variant(p.signature, self.served.read[p.name](self.target))
            for p in self.interface.properties
            if private or not p.private
        }

    def open_to(self, caller: Caller) -> bool:
        """Whether the caller may read the object without being an administrator."""
        return self.owner is None or caller.may_touch(self.owner)


class ObjectTree:
    """The objects below ``/org/phos``. Answers every call to them."""

    def __init__(self, connection: Connection, inspects: Inspects) -> None:
        self._connection = connection
        self._inspects = inspects
        self._objects: dict[str, Published] = {}
        connection.serve(CallQueue(connection, self._answer))

    def __contains__(self, path: str) -> bool:
        return path in self._objects

    def publish(self, path: str, served: Served, target: Any, owner: int | None) -> None:
        """Publish an object. Only uid ``owner`` and administrators may read it."""
        published = self._objects[path] = Published(served, target, owner)
        published.told = published.read()
        if path != ROOT:
            values = {served.interface.name: published.values(private=False)}
            self._connection.emit(ROOT, MANAGER, "InterfacesAdded", "oa{sa{sv}}", path, values)

    def withdraw(self, path: str) -> None:
        """Remove an object from the bus."""
        gone = self._objects.pop(path, None)
        if gone is not None:
            names = [gone.interface.name]
            self._connection.emit(ROOT, MANAGER, "InterfacesRemoved", "oas", path, names)

    def replace(self, path: str, target: Any) -> None:
        """Replace the target of an object, and signal the properties that differ."""
        published = self._objects[path]
        if published.target is not target:
            published.target = target
            self.changed(path)

    def changed(self, path: str) -> None:
        """Emit ``PropertiesChanged`` for the properties that differ from the last signal."""
        published = self._objects.get(path)
        if published is None:
            return
        before, now = published.told, published.read()
        published.told = now
        differing = [p for p in published.interface.properties if now[p.name] != before[p.name]]
        if differing:
            public = {p.name: Variant(p.signature, now[p.name]) for p in differing if not p.private}
            hidden = [p.name for p in differing if p.private]
            name = published.interface.name
            self._connection.emit(
                path, PROPERTIES, "PropertiesChanged", "sa{sv}as", name, public, hidden
            )

    def signal(self, path: str, member: str, *args: Any) -> None:
        """Emit a signal that the object's interface declares."""
        interface = self._objects[path].interface
        (declared,) = (each for each in interface.signals if each.name == member)
        signature = "".join(part for _, part in declared.arguments)
        self._connection.emit(path, interface.name, member, signature, *args)

    async def _answer(self, call: Call, caller: Caller) -> tuple[str, list[Any]]:
        if call.interface == INTROSPECTABLE:
            method = _method(call, *STANDARD)
            values: list[Any] = [await self._introspect(call.path, caller)]
        elif call.interface == PEER:
            method = _method(call, *STANDARD)
            values = [] if method.name == "Ping" else [await self._connection.machine_id()]
        elif call.interface == MANAGER and call.path == ROOT:
            method = _method(call, OBJECT_MANAGER)
            values = [await self._managed(caller)]
        else:
            published = self._objects.get(call.path)
            if published is None:
                raise CallError(
                    f"{_ERROR}.UnknownObject",
                    f"there is no {_name_of(call.path)}; it may be gone, "
                    "GetManagedObjects lists all",
                )
            if call.interface == PROPERTIES:
                method = _method(call, *STANDARD)
                values = await self._properties(call, published, caller)
            else:
                method = _method(call, published.interface)
                run = published.served.run[method.name]
                values = await run(caller, published.target, *call.args)
        return method.reply_signature, values

    async def _properties(self, call: Call, published: Published, caller: Caller) -> list[Any]:
        interface = published.interface
        if call.args[0] not in ("", interface.name):
            raise CallError(
                f"{_ERROR}.UnknownInterface",
                f"{call.path} has no interface {call.args[0]}; it has {interface.name}",
            )
        await self._require_open(call.path, published, caller)
        if call.member == "GetAll":
            hides = published.owner is None and any(p.private for p in interface.properties)
            return [published.values(private=not hides or await self._inspects(caller))]
        name = call.args[1]
        found = next((p for p in interface.properties if p.name == name), None)
        if found is None:
            raise CallError(
                f"{_ERROR}.UnknownProperty", f"{interface.name} has no {name}; GetAll lists all"
            )
        if call.member == "Set":
            raise CallError(
                f"{_ERROR}.PropertyReadOnly", f"{name} cannot be set; all properties are read-only"
            )
        if found.private and published.owner is None and not await self._inspects(caller):
            raise NotAuthorized(f"{name} is for administrators", hint="ask as root")
        return [Variant(found.signature, published.served.read[name](published.target))]

    async def _require_open(self, path: str, published: Published, caller: Caller) -> None:
        if not published.open_to(caller) and not await self._inspects(caller):
            raise NotAuthorized(
                f"{_name_of(path)} belongs to uid {published.owner}",
                hint="ask as its owner or as root",
            )

    async def _seen(self, caller: Caller) -> dict[str, Published]:
        """Return the objects that the caller may read."""
        seen = {path: p for path, p in self._objects.items() if p.open_to(caller)}
        if len(seen) < len(self._objects) and await self._inspects(caller):
            return dict(self._objects)
        return seen

    async def _managed(self, caller: Caller) -> dict[str, dict[str, dict[str, Variant]]]:
        managed = {}
        for path, published in (await self._seen(caller)).items():
            if path != ROOT:
                managed[path] = {published.interface.name: published.values()}
            if len(managed) % _SLICE == 0:
                await asyncio.sleep(0)
        return managed

    async def _introspect(self, path: str, caller: Caller) -> str:
        node = ElementTree.Element("node")
        seen = await self._seen(caller)
        published = self._objects.get(path)
        if published is not None:
            extra = (OBJECT_MANAGER,) if path == ROOT else ()
            for interface in (*STANDARD, *extra, published.interface):
                node.append(describe(interface))
        prefix = path.rstrip("/") + "/"
        below = {p[len(prefix) :].split("/")[0] for p in seen if p.startswith(prefix)}
        for child in sorted(below):
            ElementTree.SubElement(node, "node", name=child)
        return ElementTree.tostring(node, encoding="unicode")


def _name_of(path: str) -> str:
    """Return what users call an object: ``job 7``, ``process 4711``, ``image train-3``."""
    kind, _, key = path.removeprefix(f"{ROOT}/").partition("/")
    if not key:
        return f"object {path}"
    if key.startswith("_"):  # the number of a job; the pid of a process, with its start behind it
        return f"{kind} {key[1:].partition('_')[0]}"
    return f"{kind} {key_of(path)}"


def _method(call: Call, *interfaces: Interface) -> Method:
    """Return the method that is called. Raises :class:`CallError` when there is none, or when its
    arguments differ.
    """
    for interface in interfaces:
        for method in interface.methods:
            if method.name == call.member and call.interface in (None, interface.name):
                if call.signature == method.signature:
                    return method
                raise CallError(
                    f"{_ERROR}.InvalidArgs",
                    f"{method.name} takes '{method.signature}' "
                    f"({', '.join(name for name, _ in method.arguments)}), not '{call.signature}'",
                )
    raise CallError(
        f"{_ERROR}.UnknownMethod",
        f"{call.path} has no method {call.interface}.{call.member}; introspect it to see what "
        "it has",
    )
