"""Define a kind of files: what is refused of it, and what a dump and a restore do for it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from phosd.engine.criu.images.image_file import Field
from phosd.engine.criu.images.saved_files import SavedFiles
from phosd.engine.criu.kinds.stand_ins import StandIns
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.system.procfs import Descriptor

Sizes = Mapping[str, int]
"""The sizes in bytes of the files of a saved tree, CRIU's and others, as a manifest has them."""


@dataclass(frozen=True)
class Choices:
    """What was chosen for a dump. ``tcp``: ``refuse`` connections that lead outside, or ``close``
    them. ``user``: whose CRIU dumps the tree; None is root.
    """

    tcp: str
    user: int | None

    @classmethod
    def of(cls, tcp: str, owner: Owner) -> Self:
        return cls(tcp, None if owner.is_root else owner.uid)


@dataclass(frozen=True)
class CloneNames:
    """The names that a clone's files have instead of the original names: ``paths`` of copies, the
    TCP ``ports`` on which it listens, and ``sockets``, which are chosen when they are met.
    """

    paths: dict[bytes, bytes]
    ports: Mapping[int, int] = field(default_factory=dict)
    sockets: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Restoring:
    """A restore: what the manifest says of the tree, whose files are in ``folder``, and whose CRIU
    makes it. A rehearsed one leaves alone what the original may still use. ``memory``: descriptors
    of the device memory that the tree had open, by name.
    """

    details: CpuDetails
    folder: Path
    owner: Owner
    rehearsed: bool
    memory: Mapping[str, int] = field(default_factory=dict)


class FileKind:
    """A kind of files. A class that inherits from this one overrides what concerns it."""

    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        """Yield what CRIU cannot save of a tree, in words."""
        return iter(())

    def dump_parts(self, folder: Path, choices: Choices) -> Iterator[CriuPart]:
        """Yield what takes part in a dump into ``folder``, if CRIU needs help."""
        return iter(())

    def restore_parts(self, restoring: Restoring) -> Iterator[CriuPart]:
        """Yield what takes part in a restore, if CRIU needs help."""
        return iter(())

    def require_sound(self, details: CpuDetails, sizes: Sizes) -> None:
        """Raise :class:`ImageCorrupt` unless phosd could have written what a manifest keeps of this
        kind.
        """

    def taken(
        self, files: SavedFiles, details: CpuDetails, moved: Collection[int]
    ) -> Iterator[str]:
        """Yield what a saved tree has that only one program at a time can have, and that another
        one has now, in words. It listens on others instead of the TCP ports in ``moved``.
        """
        return iter(())

    def in_clone(self, entry: Field, names: CloneNames) -> Field:
        """Return a field of a ``file_entry`` as a clone needs it."""
        return entry

    def in_rehearsal(self, entry: Field, stand_ins: StandIns) -> Field:
        """Return a field of a ``file_entry`` so that a restore leaves what it names alone."""
        return entry


def place(descriptor: Descriptor) -> str:
    """Return where a file is open, in words."""
    return f"descriptor {descriptor.number} of pid {descriptor.pid} ({descriptor.target})"
