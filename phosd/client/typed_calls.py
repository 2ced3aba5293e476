"""Give calls the errors of :mod:`phosd.errors`, and values as D-Bus has them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from phosd.bus import ROOT, CallError, NoBusError
from phosd.client.errors import typed


@contextmanager
def typed_errors(bus: str) -> Iterator[None]:
    try:
        yield
    except (CallError, NoBusError) as error:
        raise typed(error, bus) from error


def in_microseconds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with times as D-Bus has them."""
    times = ("since", "until")
    return {name: int(x * 1e6) if name in times else x for name, x in options.items()}


def interface_of(path: str) -> str:
    kind = path.removeprefix(ROOT).strip("/").partition("/")[0] or "manager"
    return f"org.phos.{kind.capitalize()}1"
