"""All kinds of files. Another kind is a file beside the others, and a line here."""

from collections.abc import Collection, Iterator
from pathlib import Path

from phosd.engine.criu.images.image_file import Field
from phosd.engine.criu.images.saved_files import SavedFiles
from phosd.engine.criu.kinds.anonymous import AnonymousFiles
from phosd.engine.criu.kinds.devices import Devices
from phosd.engine.criu.kinds.internet_sockets import InternetSockets
from phosd.engine.criu.kinds.kind import Choices, CloneNames, FileKind, Restoring, Sizes
from phosd.engine.criu.kinds.named_files import NamedFiles
from phosd.engine.criu.kinds.stand_ins import StandIns
from phosd.engine.criu.kinds.terminals import Terminals
from phosd.engine.criu.kinds.unix_sockets import UnixSockets
from phosd.engine.criu.kinds.uprobes import Uprobes
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails

KINDS: tuple[FileKind, ...] = (
    AnonymousFiles(),
    Devices(),
    Terminals(),
    UnixSockets(),
    InternetSockets(),
    NamedFiles(),
    Uprobes(),
)


def refusals(tree: TreeResources, choices: Choices) -> Iterator[str]:
    """Yield what CRIU cannot save of the files of a tree, in words."""
    return (why for kind in KINDS for why in kind.refusals(tree, choices))


def dump_parts(folder: Path, choices: Choices) -> Iterator[CriuPart]:
    """Yield what takes part in a dump into ``folder`` for files that CRIU needs help with."""
    return (part for kind in KINDS for part in kind.dump_parts(folder, choices))


def restore_parts(restoring: Restoring) -> Iterator[CriuPart]:
    """Yield what takes part in a restore for files that CRIU needs help with."""
    return (part for kind in KINDS for part in kind.restore_parts(restoring))


def require_sound(details: CpuDetails, sizes: Sizes) -> None:
    """Require of a manifest what phosd could have written. Raises :class:`ImageCorrupt`."""
    for kind in KINDS:
        kind.require_sound(details, sizes)


def taken(files: SavedFiles, details: CpuDetails, moved: Collection[int]) -> Iterator[str]:
    """Yield what a saved tree needs for itself, and another program has now, in words, but the TCP
    ports in ``moved``.
    """
    return (what for kind in KINDS for what in kind.taken(files, details, moved))


def in_clone(entry: list[Field], names: CloneNames) -> Iterator[Field]:
    """Yield the fields of a ``file_entry`` as a clone needs them."""
    for field in entry:
        for kind in KINDS:
            field = kind.in_clone(field, names)
        yield field


def in_rehearsal(entry: list[Field], stand_ins: StandIns) -> Iterator[Field]:
    """Yield the fields of a ``file_entry`` so that a restore leaves what they name alone."""
    for field in entry:
        for kind in KINDS:
            field = kind.in_rehearsal(field, stand_ins)
        yield field
