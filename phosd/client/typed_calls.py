"""Give calls the errors of :mod:`phosd.errors`, and values as D-Bus has them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from phosd.bus import ROOT, CallError, NoBusError
from phosd.client.arguments import require
from phosd.client.errors import typed
from phosd.errors import InvalidOption


@contextmanager
def typed_errors(bus: str) -> Iterator[None]:
    try:
        yield
    except (CallError, NoBusError) as error:
        raise typed(error, bus) from error


def in_microseconds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with times as D-Bus has them. Raises :class:`InvalidOption` for a time that is
    none.
    """
    times = ("since", "until")
    for name in times:
        if name in options:
            require(name, options[name], "d")
            if not math.isfinite(options[name]):
                raise InvalidOption(
                    f"{name} is {options[name]}", hint="give seconds since the epoch"
                )
    return {name: int(x * 1e6) if name in times else x for name, x in options.items()}


def interface_of(path: str) -> str:
    kind = path.removeprefix(ROOT).strip("/").partition("/")[0] or "manager"
    return f"org.phos.{kind.capitalize()}1"
