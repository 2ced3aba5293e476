"""Turn the arguments and options of a call into what D-Bus takes, and refuse those of another type
in Python's words.
"""

from typing import Any

from phosd.bus import ERROR_PREFIX, CallError, variants
from phosd.errors import InvalidOption
from phosd.interface.model import Interface, options_of

_PLAIN = ((bool, int, float, str), "True, False, a number or text")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "as": ((list, tuple), "a list"),
    "b": ((bool,), "True or False"),
    "d": ((int, float), "a number"),
    "s": ((str,), "text"),
    "t": ((int,), "a whole number, 0 or more"),
    "u": ((int,), "a whole number, 0 or more"),
}
"""By D-Bus type: the Python types that it takes, and their name."""
_END = {"t": 1 << 64, "u": 1 << 32}
"""The first number that an unsigned D-Bus type does not hold."""


def spelled(stated: Interface, member: str, /, *args: Any, **options: Any) -> tuple[Any, ...]:
    """Return the interface, the name, the signature and the arguments of a call.

    Raises :class:`CallError` (``InvalidOption``) for a value of another type. Options that are not
    known here are left to phosd, which may be newer.
    """
    method = stated.method(member)
    for (name, signature), value in zip(method.arguments, args, strict=False):
        _require_type(name, value, signature)
    if method.options is None:
        return (stated.name, member, method.signature, *args)
    known = {each.name: each.signature for each in options_of(method.options)}
    for name, value in options.items():
        _require_type(name, value, known.get(name, ""))
    return (stated.name, member, method.signature, *args, variants(options))


def _require_type(name: str, value: Any, signature: str) -> None:
    if not _fits(value, signature):
        _, words = _TYPES.get(signature, _PLAIN)
        raise CallError(f"{ERROR_PREFIX}InvalidOption", f"{name} is {words}, not {value!r}")
    if isinstance(value, str) and not _is_carried(value):
        said = f"{name} is {value!r}, which has a zero byte, or bytes that are no UTF-8"
        raise CallError(f"{ERROR_PREFIX}InvalidOption", said)


def require(name: str, value: Any, signature: str) -> None:
    """Raise :class:`InvalidOption` for an argument that is none of the bus, if it has not the D-Bus
    type that it would have there.
    """
    if not _fits(value, signature):
        words = _TYPES[signature][1]
        raise InvalidOption(f"{name} is {words}, not {value!r}", hint=f"give {words}")


def _fits(value: Any, signature: str) -> bool:
    kinds, _ = _TYPES.get(signature, _PLAIN)
    fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    return fits and (signature not in _END or 0 <= value < _END[signature])


def _is_carried(text: str) -> bool:
    """Return whether D-Bus takes the text; it ends the connection of who sends another one."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False
