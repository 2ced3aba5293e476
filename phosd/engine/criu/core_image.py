"""Read a thread's credentials and parent-death signal from CRIU's ``core-<id>.img``.

The file is two magic numbers, then a length and a message in the protobuf wire format. The fields
are those of ``core_entry.thread_core`` in CRIU's ``core.proto``, and of ``creds.proto``.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from phosd.engine.system.procfs import Credentials
from phosd.errors import Internal

_LIMIT = 1 << 20
_THREAD_CORE = 5
_PARENT_DEATH_SIGNAL, _CREDENTIALS, _SECCOMP_MODE = 8, 10, 11
_IDS = range(1, 9)
"""User and group alternating: real, effective, saved, and file system."""
_INHERITABLE, _PERMITTED, _EFFECTIVE, _BOUNDING, _AMBIENT = 9, 10, 11, 12, 19
_SECURE_BITS, _GROUPS, _NO_NEW_PRIVILEGES = 13, 14, 18

_Fields = Mapping[int, Sequence[int | bytes]]
"""The values of a message by field number; a field may be repeated."""


def parent_death_signal(path: Path) -> int:
    """Return the signal's number, or 0. Raises :class:`Internal` for an unknown format."""
    return _last(_thread_core(path), _PARENT_DEATH_SIGNAL)


def credentials(path: Path) -> Credentials | None:
    """Return the credentials that CRIU will give the thread; None for a zombie.

    Raises :class:`Internal` for an unknown format.
    """
    core = _thread_core(path)
    if not core:
        return None
    messages = [each for each in core.get(_CREDENTIALS, ()) if isinstance(each, bytes)]
    if len(messages) != 1:
        raise _strange(path)
    fields = _read(path, messages[0])
    ids = [_last(fields, number) for number in _IDS]
    return Credentials(
        uids=tuple(ids[0::2]),
        gids=tuple(ids[1::2]),
        groups=tuple(sorted(_numbers(fields, _GROUPS))),
        inheritable=_mask(fields, _INHERITABLE),
        permitted=_mask(fields, _PERMITTED),
        effective=_mask(fields, _EFFECTIVE),
        bounding=_mask(fields, _BOUNDING),
        ambient=_mask(fields, _AMBIENT),
        secure_bits=_last(fields, _SECURE_BITS),
        no_new_privileges=_last(fields, _NO_NEW_PRIVILEGES),
        seccomp_mode=_last(core, _SECCOMP_MODE),
    )


def _thread_core(path: Path) -> _Fields:
    data = path.read_bytes()[:_LIMIT]
    try:
        (length,) = struct.unpack_from("<I", data, 8)
    except struct.error as error:
        raise _strange(path) from error
    found = _read(path, data[12 : 12 + length]).get(_THREAD_CORE, ())
    if not found:
        return {}
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise _strange(path)
    return _read(path, found[0])


def _read(path: Path, message: bytes) -> _Fields:
    found: defaultdict[int, list[int | bytes]] = defaultdict(list)
    try:
        for number, value in _fields(message):
            found[number].append(value)
    except (IndexError, ValueError) as error:
        raise _strange(path) from error
    return found


def _strange(path: Path) -> Internal:
    return Internal(f"{path.name} is not an image of CRIU 4", hint="report this")


def _numbers(fields: _Fields, number: int) -> list[int]:
    return [value for value in fields.get(number, ()) if isinstance(value, int)]


def _last(fields: _Fields, number: int) -> int:
    """Return the last value of a field (protobuf's rule if a scalar is repeated); 0 if missing."""
    return [0, *_numbers(fields, number)][-1]


def _mask(fields: _Fields, number: int) -> int:
    """Return a set of capabilities, which is stored in words of 32 bits."""
    return sum(word << 32 * place for place, word in enumerate(_numbers(fields, number)))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
                yield tag >> 3, value
            case 1:
                at += 8
            case 2:
                length, at = _varint(message, at)
                yield tag >> 3, message[at : at + length]
                at += length
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
