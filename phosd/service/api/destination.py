"""Read the GPUs that a request names."""

import re
from collections.abc import Collection
from contextlib import suppress

from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.placement import find
from phosd.errors import InvalidOption

_DESTINATION = re.compile("[0-9A-Za-z:=, -]{1,2048}")


def require_destination(text: str) -> None:
    """Raise unless the text may be a destination: it is sent in signals and shown verbatim."""
    if not _DESTINATION.fullmatch(text):
        raise InvalidOption(
            f"{text[:64]!r} is no destination",
            hint="name a GPU: its number, the beginning of its UUID, or OLD:NEW for each",
        )


def named_in(destination: str, gpus: Collection[GpuInfo]) -> frozenset[int]:
    """Return the ordinals of those of ``gpus`` that a destination names."""
    named = set()
    for part in destination.replace("=", ":").split(","):
        with suppress(InvalidOption):  # the engine reports it
            named.add(find(part.rpartition(":")[2], list(gpus)))
    return frozenset(named)
