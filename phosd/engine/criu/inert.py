"""Change an image of CRIU's so that what it has of the GPU driver's devices is restored as inert.

CRIU notes mappings and descriptors of these devices for its plugin, which does not restore them:
whoever has them has inherited them and cannot use them. Here the mappings become memory that nobody
can access, at the same place, and the descriptors become counters that never count (eventfd), which
may be waited for and closed like any other. The fields are those of ``vma.proto``, ``mm.proto``,
``fdinfo.proto``, ``ext-file.proto`` and ``eventfd.proto``.
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from phosd.engine.criu.image_file import Field, ImageFile, fields, message, strange
from phosd.errors import Unsupported

_MM_VMAS = 14
_START, _END, _PAGE_OFFSET, _SHARED_ID, _PROTECTION, _FLAGS, _STATUS, _DESCRIPTOR = range(1, 9)
_REGULAR, _ANONYMOUS_PRIVATE, _OF_PLUGIN = 1, 1 << 9, 1 << 27
"""Bits of a mapping's status."""
_NO_RESERVE = 0x4000
"""``MAP_NORESERVE``: the mapping may be larger than the memory, and nothing of it is used."""
_NO_DESCRIPTOR = 1
"""-1 as a ``sint64``."""
_FILE_TYPE, _FILE_ID, _FILE_COUNTER, _FILE_EXTERNAL = 1, 2, 8, 15
_DESCRIPTOR_ID, _DESCRIPTOR_TYPE = 1, 3
_EXTERNAL_OWNER = 5
_COUNTER_ID, _COUNTER_FLAGS, _COUNTER_OWNER, _COUNTER_VALUE = range(1, 5)
_EVENTFD, _EXTERNAL = 6, 16
"""CRIU's types of files."""


def make_inert(folder: Path) -> None:
    """Change the images of ``folder``.

    Raises :class:`~phosd.errors.Internal` if they are not CRIU's, and :class:`Unsupported` for a
    file of the driver's that no process has open: it is on its way to one, which could use it.
    """
    inherited: set[int | bytes] = set()

    def descriptor(found: list[Field]) -> Iterable[Field]:
        values = {field.number: field.value for field in found}
        if values.get(_DESCRIPTOR_TYPE) != _EXTERNAL:
            return found
        inherited.add(values.get(_DESCRIPTOR_ID, 0))
        counter = Field.of(_DESCRIPTOR_TYPE, _EVENTFD)
        return [counter if field.number == _DESCRIPTOR_TYPE else field for field in found]

    def file(found: list[Field]) -> Iterable[Field]:
        return _file(found, inherited)

    for path in folder.glob("mm-*.img"):
        _rewrite(path, _memory)
    for path in folder.glob("fdinfo-*.img"):
        _rewrite(path, descriptor)
    _rewrite(folder / "files.img", file)


def _rewrite(path: Path, change: Callable[[list[Field]], Iterable[Field]]) -> None:
    """Change every message of a file; a file without changes is left as it is."""
    found = ImageFile.read(path)
    try:
        changed = tuple(message(change([*fields(each)])) for each in found.messages)
    except ValueError as error:
        raise strange(path) from error
    if changed != found.messages:
        ImageFile(found.magic, changed).write(path)


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


def _file(found: list[Field], inherited: Collection[int | bytes]) -> Iterable[Field]:
    values = {field.number: field.value for field in found}
    external = values.get(_FILE_EXTERNAL)
    if values.get(_FILE_TYPE) != _EXTERNAL or not isinstance(external, bytes):
        return found
    owner = {field.number: field.value for field in fields(external)}.get(_EXTERNAL_OWNER, b"")
    number = values.get(_FILE_ID, 0)
    if number not in inherited:
        raise Unsupported(
            "a file of the GPU driver is on its way through a socket of the program, and cannot be "
            "saved",
            hint="the program goes on; try again when it has been received",
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
