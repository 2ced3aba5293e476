"""Make calls whose errors are those of :mod:`phosd.errors`, with options as D-Bus has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phosd.bus import ROOT, CallError, NoBusError
from phosd.client.calls import Calls
from phosd.client.daemon import Daemon
from phosd.client.errors import typed


class TypedCalls(Calls):
    """The calls, whose errors are typed."""

    def __init__(self, daemon: Daemon, bus: str) -> None:
        self._daemon = daemon
        self._bus = bus

    async def _call(self, path: str, interface: str, member: str, *call: Any) -> Any:
        with typed_errors(self._bus):
            values = await self._daemon.call(path, interface, member, *call)
        return values[0] if values else None


@contextmanager
def typed_errors(bus: str) -> Iterator[None]:
    try:
        yield
    except (CallError, NoBusError) as error:
        raise typed(error, bus) from error


def plain(options: Any) -> dict[str, Any]:
    return dict(options)


def in_microseconds(options: Any) -> dict[str, Any]:
    """Return options with times as D-Bus has them."""
    times = ("since", "until")
    return {name: int(x * 1e6) if name in times else x for name, x in options.items()}


def interface_of(path: str) -> str:
    kind = path.removeprefix(ROOT).strip("/").partition("/")[0] or "manager"
    return f"org.phos.{kind.capitalize()}1"
