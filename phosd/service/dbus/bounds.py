"""Say in words which values an option may have: its type and its bounds."""

from typing import Any

import msgspec
from msgspec.inspect import FloatType, IntType, Metadata, StrType, Type, UnionType

_NAMES: dict[type[Type], str] = {
    msgspec.inspect.BoolType: "true or false",
    IntType: "a whole number",
    FloatType: "a number",
    StrType: "text",
    msgspec.inspect.ListType: "a list",
    msgspec.inspect.VarTupleType: "a list",
}
_ANY = 1 << 31
"""From here on a bound is that of a type, which nobody needs to be told."""
_SHOWN = 80


def types_of(kind: type[msgspec.Struct], name: str) -> list[Type]:
    """Return the types that an option may have: one, and perhaps None's."""
    return [each.type if isinstance(each, Metadata) else each for each in _parts(kind, name)]


def _parts(kind: type[msgspec.Struct], name: str) -> tuple[Type, ...]:
    (field,) = (each for each in msgspec.structs.fields(kind) if each.name == name)
    found = msgspec.inspect.type_info(field.type)
    return found.types if isinstance(found, UnionType) else (found,)


def misfit(kind: type[msgspec.Struct], name: str, value: Any) -> str:
    """Return what an option has to be, and what it is."""
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return f"{name} has to be {_words(_parts(kind, name)[0])}, not {shown}"


def _words(kind: Type) -> str:
    bounds: list[str] = []
    if isinstance(kind, Metadata):
        return str((kind.extra_json_schema or {}).get("title") or _words(kind.type))
    if isinstance(kind, IntType | FloatType):
        told = (
            ("greater than", kind.gt),
            ("at least", kind.ge),
            ("less than", kind.lt),
            ("at most", kind.le),
        )
        bounds = [f"{words} {x:.15g}" for words, x in told if x is not None and x < _ANY]
    elif isinstance(kind, StrType) and kind.max_length is not None:
        bounds = [f"at most {kind.max_length} characters"]
    return ", ".join(filter(None, (_NAMES.get(type(kind), "another value"), " and ".join(bounds))))
