"""Read a thread's credentials and parent-death signal from CRIU's ``core-<id>.img``.

The fields are those of ``core_entry.thread_core`` in CRIU's ``core.proto``, and of ``creds.proto``.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from phosd.engine.criu.image_file import ImageFile, fields, strange
from phosd.engine.system.procfs import Credentials

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
    """Return the signal's number, or 0.

    Raises :class:`~phosd.errors.Internal` for an unknown format.
    """
    return _last(_thread_core(path), _PARENT_DEATH_SIGNAL)


def credentials(path: Path) -> Credentials | None:
    """Return the credentials that CRIU will give the thread; None for a zombie.

    Raises :class:`~phosd.errors.Internal` for an unknown format.
    """
    core = _thread_core(path)
    if not core:
        return None
    messages = [each for each in core.get(_CREDENTIALS, ()) if isinstance(each, bytes)]
    if len(messages) != 1:
        raise strange(path)
    creds = _read(path, messages[0])
    sets = (_GROUPS, _INHERITABLE, _PERMITTED, _EFFECTIVE, _BOUNDING, _AMBIENT)
    if any(isinstance(value, bytes) for number in sets for value in creds.get(number, ())):
        raise strange(path)  # packed, as CRIU does not write them, but reads them
    ids = [_last(creds, number) for number in _IDS]
    return Credentials(
        uids=tuple(ids[0::2]),
        gids=tuple(ids[1::2]),
        groups=tuple(sorted(_numbers(creds, _GROUPS))),
        inheritable=_mask(creds, _INHERITABLE),
        permitted=_mask(creds, _PERMITTED),
        effective=_mask(creds, _EFFECTIVE),
        bounding=_mask(creds, _BOUNDING),
        ambient=_mask(creds, _AMBIENT),
        secure_bits=_last(creds, _SECURE_BITS),
        no_new_privileges=_last(creds, _NO_NEW_PRIVILEGES),
        seccomp_mode=_last(core, _SECCOMP_MODE),
    )


def _thread_core(path: Path) -> _Fields:
    messages = ImageFile.read(path, _LIMIT).messages
    if len(messages) != 1:
        raise strange(path)
    found = _read(path, messages[0]).get(_THREAD_CORE, ())
    if not found:
        return {}
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise strange(path)
    return _read(path, found[0])


def _read(path: Path, message: bytes) -> _Fields:
    found: defaultdict[int, list[int | bytes]] = defaultdict(list)
    try:
        for field in fields(message):
            found[field.number].append(field.value)
    except ValueError as error:
        raise strange(path) from error
    return found


def _numbers(fields: _Fields, number: int) -> list[int]:
    return [value for value in fields.get(number, ()) if isinstance(value, int)]


def _last(fields: _Fields, number: int) -> int:
    """Return the last value of a field (protobuf's rule if a scalar is repeated); 0 if missing."""
    return [0, *_numbers(fields, number)][-1]


def _mask(fields: _Fields, number: int) -> int:
    """Return a set of capabilities, which is stored in words of 32 bits."""
    return sum(word << 32 * place for place, word in enumerate(_numbers(fields, number)))
