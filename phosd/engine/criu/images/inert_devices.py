"""Rewrite a CRIU image so that the GPU driver's files and mappings come back as inert placeholders.

CRIU notes mappings and descriptors of these devices for its plugin, which does not restore them. A
process that has inherited them cannot use them: the mappings become memory that nobody can access,
at the same place, and the descriptors become counters that never count (eventfd), which may be
waited for and closed like any other. What NVML has open becomes a file of that path: it can begin
anew with it. Exported device memory becomes a file of a name that stands for it, which a restore
gives CRIU.
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from phosd.engine.criu.images.fields import (
    EventfdFileEntry,
    ExtFileEntry,
    FdinfoEntry,
    FdTypes,
    FileEntry,
    MemfdFileEntry,
    MmEntry,
    RegFileEntry,
    TaskKobjIdsEntry,
    VmaEntry,
)
from phosd.engine.criu.images.image_file import Field, ImageFile, fields, message, rewrite, strange
from phosd.engine.system.procfs import Descriptor
from phosd.errors import Reason, Unsupported

_REGULAR, _ANONYMOUS_PRIVATE, _OF_PLUGIN = 1, 1 << 9, 1 << 27
"""Bits of a mapping's status."""
_NO_RESERVE = 0x4000
"""``MAP_NORESERVE``: the mapping may be larger than the memory, and nothing of it is used."""
_NO_DESCRIPTOR = 1
"""-1 as a ``sint64``."""
_NO_POSITION = (1 << 64) - 1
"""These devices cannot be positioned (``lseek``), which CRIU otherwise does."""
_OWNERS = {
    FdTypes.EXT: (FileEntry.EXT, ExtFileEntry.FOWN),
    FdTypes.MEMFD: (FileEntry.MEMFD, MemfdFileEntry.FOWN),
}
"""Where a file of each kind says whom it signals. A file in memory is exported memory of the
software GPU.
"""


def make_inert(
    folder: Path, reopened: Iterable[Descriptor] = (), own: Callable[[int], int] = int
) -> None:
    """Change the images of ``folder``. Restore is to open the files of ``reopened`` anew. ``own``
    returns the pid that a process has for itself.

    Raises :class:`~phosd.errors.Internal` if they are not CRIU's, and :class:`Unsupported` for a
    driver file that no process has open: it is on its way to one, which could use it.
    """
    anew = _file_numbers(folder, reopened, own)
    held: set[int | bytes] = set()

    def descriptor(found: list[Field]) -> Iterable[Field]:
        values = {field.number: field.value for field in found}
        number = values.get(FdinfoEntry.ID, 0)
        if values.get(FdinfoEntry.TYPE) != FdTypes.EXT and number not in anew:
            return found
        held.add(number)
        kind = Field.of(FdinfoEntry.TYPE, FdTypes.REG if number in anew else FdTypes.EVENTFD)
        return [kind if field.number == FdinfoEntry.TYPE else field for field in found]

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
        for entry in _values(folder / f"fdinfo-{ids.get(TaskKobjIdsEntry.FILES_ID)!r}.img"):
            descriptor = wanted.get(entry.get(FdinfoEntry.FD, 0))
            if descriptor and entry.get(FdinfoEntry.TYPE) in _OWNERS:
                found[entry.get(FdinfoEntry.ID, 0)] = descriptor
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
        if field.number == MmEntry.VMAS and isinstance(field.value, bytes):
            yield Field.of(MmEntry.VMAS, message(_mapping([*fields(field.value)])))
        else:
            yield field


def _mapping(found: list[Field]) -> Iterable[Field]:
    values = {field.number: field.value for field in found}
    status = values.get(VmaEntry.STATUS)
    if not isinstance(status, int) or not status & _OF_PLUGIN:
        return found
    inaccessible = {
        VmaEntry.START: values.get(VmaEntry.START, 0),
        VmaEntry.END: values.get(VmaEntry.END, 0),
        VmaEntry.PGOFF: 0,
        VmaEntry.SHMID: 0,
        VmaEntry.PROT: 0,
        VmaEntry.FLAGS: mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
        VmaEntry.STATUS: _REGULAR | _ANONYMOUS_PRIVATE,
        VmaEntry.FD: _NO_DESCRIPTOR,
    }
    return [Field.of(number, value) for number, value in inaccessible.items()]


def _file(
    found: list[Field],
    held: Collection[int | bytes],
    anew: Mapping[int | bytes, Descriptor],
) -> Iterable[Field]:
    values = {field.number: field.value for field in found}
    number, kind = values.get(FileEntry.ID, 0), values.get(FileEntry.TYPE)
    if kind != FdTypes.EXT and not (kind == FdTypes.MEMFD and number in anew):
        return found
    place, owner_field = _OWNERS[FdTypes(kind)]
    entry = values.get(place)
    if not isinstance(entry, bytes):
        return found
    owner = {field.number: field.value for field in fields(entry)}.get(owner_field, b"")
    if number not in held:
        raise Unsupported(
            "a file of the GPU driver is on its way through a socket of the program, and cannot be "
            "saved",
            hint="the program goes on; try again when it has been received",
            reason=Reason.UNREAD_DATA,
        )
    if number in anew:
        path = (
            Field.of(RegFileEntry.ID, number),
            Field.of(RegFileEntry.FLAGS, anew[number].flags & ~os.O_CLOEXEC),
            Field.of(RegFileEntry.POS, _NO_POSITION),
            Field.of(RegFileEntry.FOWN, owner),
            Field.of(RegFileEntry.NAME, anew[number].target.encode()),
        )
        return (
            Field.of(FileEntry.TYPE, FdTypes.REG),
            Field.of(FileEntry.ID, number),
            Field.of(FileEntry.REG, message(path)),
        )
    counter = (
        Field.of(EventfdFileEntry.ID, number),
        Field.of(EventfdFileEntry.FLAGS, os.O_RDWR | os.O_NONBLOCK),
        Field.of(EventfdFileEntry.FOWN, owner),
        Field.of(EventfdFileEntry.COUNTER, 0),
    )
    return (
        Field.of(FileEntry.TYPE, FdTypes.EVENTFD),
        Field.of(FileEntry.ID, number),
        Field.of(FileEntry.EFD, message(counter)),
    )
