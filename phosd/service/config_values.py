"""Declare the kinds of values in ``phosd.toml``: bounds, and how mistakes are told.

A title completes "this is not ...", and an example follows it. Values with units are read as text:
``read`` (in ``extra``) returns what it stands for, or None, and ``schema`` describes it.
"""

import ipaddress
import json
import pwd
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from phosd import units
from phosd.engine.operations.admission import SizeOrShare


def read(kind: Any, value: object) -> Any:
    """Convert a value of the file. Raises :class:`ValueError` that says what to write instead."""
    from_text = _extra(kind).get("read")
    try:
        found = from_text(str(value)) if from_text else value
        if found is None:
            raise ValueError(value)
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, ValueError, LookupError, OverflowError):
        meant = f"{schema(kind)['title']}; write for example {example(kind)}"
        raise ValueError(f"{literal(value)} is not {meant}") from None


def literal(value: object) -> str:
    """Return a value as the file has it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def example(kind: Any) -> str:
    return literal(schema(kind)["examples"][0])


def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a kind. TOML has no null, and texts stand for objects."""
    found = msgspec.json.schema(kind)
    found |= found.pop("anyOf", [{}])[0] | _extra(kind).get("schema", {})
    return {name: value for name, value in found.items() if not name.startswith("$")}


def _extra(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in get_args(kind):
        found |= (each.extra or {}) if isinstance(each, Meta) else _extra(each)
    return found


def about(text: str) -> Meta:
    """Describe a setting."""
    return Meta(description=" ".join(text.split()))


def size(text: str) -> int:
    """Return the bytes of ``16 GiB``, ``500M`` or ``4096``. Raises :class:`ValueError`."""
    found: int = read(Size, text)
    return found


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return not host or ipaddress.ip_address(host).is_loopback


def _user(text: str) -> int:
    return int(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid


def _path(text: str) -> Path | None:
    return Path(text) if text.startswith("/") else None


def _size_or_share(text: str) -> SizeOrShare:
    share = units.share(text)
    return SizeOrShare(size=size(text)) if share is None else SizeOrShare(share=share)


def _address(text: str) -> str | None:
    """Check ``address:port``. The address must be numeric, so that no name server decides where
    phosd listens.
    """
    host, _, port = text.rpartition(":")
    ipaddress.ip_address(host.strip("[]"))
    return text if 0 < int(port) < 1 << 16 else None


def _texts(read: object, pattern: str, *types: str) -> dict[str, Any]:
    return {"read": read, "schema": {"type": ["string", *types], "pattern": f"^({pattern})$"}}


_SIZES = _texts(units.size, units.SIZE, "integer")
_DURATIONS = _texts(units.duration, units.DURATION, "number")
_SHARES = _texts(_size_or_share, f"{units.SIZE}|{units.SHARE}", "integer")
_PATHS = _texts(_path, "/.*")
_USERS = _texts(_user, ".+", "integer")
_ADDRESSES = _texts(_address, ".+:[0-9]{1,5}")

Size = Annotated[int, Meta(ge=0, title="a size", examples=["16GiB"], extra=_SIZES)]
LargeSize = Annotated[
    int, Meta(ge=1 << 20, title="a size of at least 1 MiB", examples=["16GiB"], extra=_SIZES)
]
Duration = Annotated[float, Meta(title="a duration", examples=["10min"], extra=_DURATIONS)]
LEAST_SECOND = Meta(ge=1, title="a duration of at least 1 s")
_SHARE = Meta(title="a size or a share below 100%", examples=["5%"], extra=_SHARES)
Share = Annotated[SizeOrShare, _SHARE, Meta(extra_json_schema={"minimum": 0})]
AbsolutePath = Annotated[Path, Meta(title="an absolute path", examples=["/srv/phos"], extra=_PATHS)]
UserId = Annotated[int, Meta(ge=0, title="a user, by name or id", examples=["root"], extra=_USERS)]
Address = Annotated[
    str, Meta(title="an address and port", examples=["127.0.0.1:9476"], extra=_ADDRESSES)
]
Pattern = Annotated[str, Meta(min_length=1, title="a pattern", examples=["python *train.py*"])]
Images = Annotated[int, Meta(ge=1, title="a number of images, at least 1", examples=[5])]
Versions = Annotated[int, Meta(ge=0, title="a number of versions", examples=[3])]
Days = Annotated[float, Meta(ge=0.01, title="a number of days, at least 0.01", examples=[30])]
Truth = Annotated[bool, Meta(title="true or false", examples=[True])]
