"""Change an image of CRIU's so that what it has of the GPU driver's devices can be restored.

CRIU notes mappings and descriptors of these devices for its plugin, which does not restore them.
Who has inherited them cannot use them: the mappings become memory that nobody can access, at the
same place, and the descriptors become counters that never count (eventfd), which may be waited for
and closed like any other. What NVML has open becomes a file of that path: it can begin anew with
it. The fields are those of ``vma.proto``, ``mm.proto``, ``fdinfo.proto``, ``ext-file.proto``,
``eventfd.proto``, ``regfile.proto`` and ``core.proto`` (``task_kobj_ids_entry``).
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from phosd.engine.criu.image_file import Field, ImageFile, fields, message, rewrite, strange
from phosd.engine.system.procfs import Descriptor
from phosd.errors import Reason, Unsupported

_MM_VMAS = 14
_START, _END, _PAGE_OFFSET, _SHARED_ID, _PROTECTION, _FLAGS, _STATUS, _DESCRIPTOR = range(1, 9)
_REGULAR, _ANONYMOUS_PRIVATE, _OF_PLUGIN = 1, 1 << 9, 1 << 27
"""Bits of a mapping's status."""
_NO_RESERVE = 0x4000
"""``MAP_NORESERVE``: the mapping may be larger than the memory, and nothing of it is used."""
_NO_DESCRIPTOR = 1
"""-1 as a ``sint64``."""
_FILE_TYPE, _FILE_ID, _FILE_REGULAR, _FILE_COUNTER, _FILE_EXTERNAL = 1, 2, 3, 8, 15
_DESCRIPTOR_ID, _DESCRIPTOR_TYPE, _DESCRIPTOR_NUMBER = 1, 3, 4
_IDS_FILES = 2
_EXTERNAL_OWNER = 5
_COUNTER_ID, _COUNTER_FLAGS, _COUNTER_OWNER, _COUNTER_VALUE = range(1, 5)
_PATH_ID, _PATH_FLAGS, _PATH_POSITION, _PATH_OWNER, _PATH_NAME = 1, 2, 3, 5, 6
_REGULAR_FILE, _EVENTFD, _EXTERNAL = 1, 6, 16
"""CRIU's types of files."""


def make_inert(
    folder: Path, reopened: Iterable[Descriptor] = (), own: Callable[[int], int] = int
) -> None:
    """Change the images of ``folder``. Restore is to open the files of ``reopened`` anew. ``own``
    returns the pid that a process has for itself.

    Raises :class:`~phosd.errors.Internal` if they are not CRIU's, and :class:`Unsupported` for a
    file of the driver's that no process has open: it is on its way to one, which could use it.
    """
    anew = _file_numbers(folder, reopened, own)
    held: set[int | bytes] = set()

    def descriptor(found: list[Field]) -> Iterable[Field]:
        values = {field.number: field.value for field in found}
        if values.get(_DESCRIPTOR_TYPE) != _EXTERNAL:
            return found
        number = values.get(_DESCRIPTOR_ID, 0)
        held.add(number)
        kind = Field.of(_DESCRIPTOR_TYPE, _REGULAR_FILE if number in anew else _EVENTFD)
        return [kind if field.number == _DESCRIPTOR_TYPE else field for field in found]

    def file(found: list[Field]) -> Iterable[Field]:
        return _file(found, held, anew)

    for path in folder.glob("mm-*.img"):
        rewrite(path, _memory)
    for path in folder.glob("fdinfo-*.img"):
        rewrite(path, descriptor)
    rewrite(folder / "files.img", file)


def _file_numbers(
    folder: Path, descriptors: Iterable[Descriptor], own: Callable[[int], int]
) -> dict[int | bytes, Descriptor]:
    """Return what CRIU numbers the files of these descriptors."""
    by_process: dict[int, dict[int | bytes, Descriptor]] = {}
    for each in descriptors:
        by_process.setdefault(own(each.pid), {})[each.number] = each
    found = {}
    for pid, wanted in by_process.items():
        ids = next(_values(folder / f"ids-{pid}.img"), {})
        for entry in _values(folder / f"fdinfo-{ids.get(_IDS_FILES)!r}.img"):
            descriptor = wanted.get(entry.get(_DESCRIPTOR_NUMBER, 0))
            if descriptor and entry.get(_DESCRIPTOR_TYPE) == _EXTERNAL:
                found[entry.get(_DESCRIPTOR_ID, 0)] = descriptor
    return found


def _values(path: Path) -> Iterator[dict[int, int | bytes]]:
    """Yield the fields of each message of a file."""
    try:
        for each in ImageFile.read(path).messages:
            yield {field.number: field.value for field in fields(each)}
    except ValueError as error:
        raise strange(path) from error


def _memory(found: list[Field]) -> Iterable[Field]:
    for field in found:
        if field.number == _MM_VMAS and isinstance(field.value, bytes):
            yield Field.of(_MM_VMAS, message(_mapping([*fields(field.value)])))
        else:
            yield field


def _mapping(found: list[Field]) -> Iterable[Field]:
    values = {field.number: field.value for field in found}
    status = values.get(_STATUS)
    if not isinstance(status, int) or not status & _OF_PLUGIN:
        return found
    inaccessible = {
        _START: values.get(_START, 0),
        _END: values.get(_END, 0),
        _PAGE_OFFSET: 0,
        _SHARED_ID: 0,
        _PROTECTION: 0,
        _FLAGS: mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
        _STATUS: _REGULAR | _ANONYMOUS_PRIVATE,
        _DESCRIPTOR: _NO_DESCRIPTOR,
    }
    return [Field.of(number, value) for number, value in inaccessible.items()]


def _file(
    found: list[Field],
    held: Collection[int | bytes],
    anew: Mapping[int | bytes, Descriptor],
) -> Iterable[Field]:
    values = {field.number: field.value for field in found}
    external = values.get(_FILE_EXTERNAL)
    if values.get(_FILE_TYPE) != _EXTERNAL or not isinstance(external, bytes):
        return found
    owner = {field.number: field.value for field in fields(external)}.get(_EXTERNAL_OWNER, b"")
    number = values.get(_FILE_ID, 0)
    if number not in held:
        raise Unsupported(
            "a file of the GPU driver is on its way through a socket of the program, and cannot be "
            "saved",
            hint="the program goes on; try again when it has been received",
            reason=Reason.UNREAD_DATA,
        )
    if number in anew:
        path = (
            Field.of(_PATH_ID, number),
            Field.of(_PATH_FLAGS, anew[number].flags & ~os.O_CLOEXEC),
            Field.of(_PATH_POSITION, 0),
            Field.of(_PATH_OWNER, owner),
            Field.of(_PATH_NAME, anew[number].target.encode()),
        )
        return (
            Field.of(_FILE_TYPE, _REGULAR_FILE),
            Field.of(_FILE_ID, number),
            Field.of(_FILE_REGULAR, message(path)),
        )
    counter = (
        Field.of(_COUNTER_ID, number),
        Field.of(_COUNTER_FLAGS, os.O_RDWR | os.O_NONBLOCK),
        Field.of(_COUNTER_OWNER, owner),
        Field.of(_COUNTER_VALUE, 0),
    )
    return (
        Field.of(_FILE_TYPE, _EVENTFD),
        Field.of(_FILE_ID, number),
        Field.of(_FILE_COUNTER, message(counter)),
    )
