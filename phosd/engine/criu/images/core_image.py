"""Read a thread's credentials, its parent-death signal and its area of restartable sequences from
CRIU's ``core-<id>.img``.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from phosd.engine.criu.images.fields import CoreEntry, CredsEntry, RseqEntry, ThreadCoreEntry
from phosd.engine.criu.images.image_file import ImageFile, fields, strange
from phosd.engine.system.procfs import Credentials

_LIMIT = 1 << 20
_LEAST_RSEQ_BYTES = 32
"""Bytes that an area of restartable sequences has, if it does not say more."""
_IDS = (
    *(CredsEntry.UID, CredsEntry.GID, CredsEntry.EUID, CredsEntry.EGID),
    *(CredsEntry.SUID, CredsEntry.SGID, CredsEntry.FSUID, CredsEntry.FSGID),
)
"""User and group alternating: real, effective, saved, and file system."""

_SETS = (
    *(CredsEntry.CAP_INH, CredsEntry.CAP_PRM, CredsEntry.CAP_EFF, CredsEntry.CAP_BND),
    *(CredsEntry.CAP_AMB, CredsEntry.GROUPS),
)

_Fields = Mapping[int, Sequence[int | bytes]]
"""The values of a message by field number; a field may be repeated."""


def parent_death_signal(path: Path) -> int:
    """Return the signal's number, or 0.

    Raises :class:`~phosd.errors.Internal` for an unknown format.
    """
    return _last(_thread_core(path), ThreadCoreEntry.PDEATH_SIG)


def credentials(path: Path) -> Credentials | None:
    """Return the credentials that CRIU will give the thread; None for a zombie.

    Raises :class:`~phosd.errors.Internal` for an unknown format.
    """
    core = _thread_core(path)
    if not core:
        return None
    messages = [each for each in core.get(ThreadCoreEntry.CREDS, ()) if isinstance(each, bytes)]
    if len(messages) != 1:
        raise strange(path)
    creds = _read(path, messages[0])
    if any(isinstance(value, bytes) for number in _SETS for value in creds.get(number, ())):
        raise strange(path)  # packed, as CRIU does not write them, but reads them
    ids = [_last(creds, number) for number in _IDS]
    return Credentials(
        uids=tuple(ids[0::2]),
        gids=tuple(ids[1::2]),
        groups=tuple(sorted(_numbers(creds, CredsEntry.GROUPS))),
        inheritable=_mask(creds, CredsEntry.CAP_INH),
        permitted=_mask(creds, CredsEntry.CAP_PRM),
        effective=_mask(creds, CredsEntry.CAP_EFF),
        bounding=_mask(creds, CredsEntry.CAP_BND),
        ambient=_mask(creds, CredsEntry.CAP_AMB),
        secure_bits=_last(creds, CredsEntry.SECBITS),
        no_new_privileges=_last(creds, CredsEntry.NO_NEW_PRIVS),
        seccomp_mode=_last(core, ThreadCoreEntry.SECCOMP_MODE),
    )


def rseq_area(path: Path) -> tuple[int, int] | None:
    """Return where the thread's area of restartable sequences begins and ends; None if CRIU will
    register none for it. Raises :class:`~phosd.errors.Internal` for an unknown format.
    """
    found = _thread_core(path).get(ThreadCoreEntry.RSEQ_ENTRY, ())
    if not found:
        return None
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise strange(path)
    area = _read(path, found[0])
    start, size = _last(area, RseqEntry.RSEQ_ABI_POINTER), _last(area, RseqEntry.RSEQ_ABI_SIZE)
    return (start, start + max(size, _LEAST_RSEQ_BYTES)) if start else None


def _thread_core(path: Path) -> _Fields:
    messages = ImageFile.read(path, _LIMIT).messages
    if len(messages) != 1:
        raise strange(path)
    found = _read(path, messages[0]).get(CoreEntry.THREAD_CORE, ())
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
