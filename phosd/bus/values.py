"""Convert values, names and paths for D-Bus."""

import re
from collections.abc import Mapping
from typing import Any

from phosd.bus.dbus import Variant, is_object_path_valid

ROOT = "/org/phos"
_ESCAPED = re.compile("_([0-9a-f]{2})")


def clean(value: Any) -> Any:
    """Return the value with all strings made valid for D-Bus.

    A command line may hold any bytes; the bus disconnects a sender of strings that are not UTF-8.
    """
    if isinstance(value, str):
        return value.replace("\0", " ").encode("utf-8", "replace").decode()
    if isinstance(value, Variant):
        return Variant(value.signature, clean(value.value))
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def path_of(kind: str, key: str) -> str:
    """Return the object path for a key; characters not allowed in paths are written ``_<hex>``."""
    escaped = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in key)
    return f"{ROOT}/{kind}/{escaped}"


def key_of(path: str) -> str:
    """Return the key for which :func:`path_of` has made the path."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), path.rpartition("/")[2])


def is_path(text: str) -> bool:
    """Whether the text is a well-formed object path."""
    return bool(is_object_path_valid(text))


def variants(values: Mapping[str, bool | int | float | str]) -> dict[str, Variant]:
    """Return plain values as an ``a{sv}``, with signature b, x, d or s by type."""
    return {key: Variant(_signature(value), value) for key, value in values.items()}


def _signature(value: bool | int | float | str) -> str:
    match value:
        case bool():
            return "b"
        case int():
            return "x"
        case float():
            return "d"
    return "s"
