"""Convert single values of ``phosd.toml``; a :class:`ValueError` says what to write instead."""

import ipaddress
import pwd
from typing import Any, TypeVar

from phosd import units
from phosd.engine.operations.admission import SizeOrShare
from phosd.service.jobs.limits import MOST_JOBS

_Number = TypeVar("_Number", int, float)


def size(text: str | int) -> int:
    """Return the bytes that ``"16 GiB"``, ``"500M"`` or a plain number stand for. Raises
    :class:`ValueError`.
    """
    found = units.size(str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a size; write bytes or for example '16GiB'")
    return found


def user(value: Any) -> int:
    """Return the id of a user given by number or by name."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    try:
        return pwd.getpwnam(value).pw_uid
    except (KeyError, TypeError):
        raise ValueError(f"there is no user {value!r}") from None


def job_count(value: Any) -> int:
    count: int = at_least(1, number_in(value, int), "1 job")
    if count > MOST_JOBS:
        raise ValueError(f"{count} is more than the most that works, {MOST_JOBS} jobs")
    return count


def size_or_share(value: Any, of: str) -> SizeOrShare:
    """Parse a size, or a share of the disk or memory such as ``5%``."""
    if not isinstance(value, str) or not value.endswith("%"):
        return SizeOrShare(size=size_in(value))
    try:
        percent = float(value[:-1])
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 100:
        raise ValueError(f"{value!r} is not a share of the {of}; write for example '5%'")
    return SizeOrShare(share=percent / 100)


def address(value: Any) -> str:
    """Check ``address:port``. The address must be numeric, so that no name server decides where
    phosd listens.
    """
    host, _, port = str(value).rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        if 0 < int(port) < 1 << 16:
            return str(value)
    except ValueError:
        pass
    raise ValueError(f"{value!r} is not an address and port; write for example '127.0.0.1:9476'")


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return not host or ipaddress.ip_address(host).is_loopback


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def size_in(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write bytes or for example '16GiB'")
    return size(value)


def seconds_in(value: Any) -> float:
    if not isinstance(value, str):
        return float(number_in(value, (int, float)))
    found = units.duration(value)
    if found is None:
        raise ValueError(f"{value!r} is not a duration; write seconds or for example '10min'")
    return found


def number_in(value: Any, kinds: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{value!r} is not a number")
    return value


def at_least(least: _Number, value: _Number, name: str) -> _Number:
    if value < least:
        raise ValueError(f"{value} is less than the least that works, {name}")
    return value
