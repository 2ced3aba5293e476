"""The files of a dumped tree: recorded, and copied where they are in memory."""

from pathlib import Path
from typing import Self

from msgspec.structs import replace

from phosd.engine.criu.dump import file_records, shm_relink
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails, MappedFile, MemoryFile, OpenFile


class Files(CriuPart):
    """Records the files that the tree of ``owner`` has open and mapped, and copies those in memory
    to ``folder``. ``before`` is the tree while it ran.
    """

    def __init__(self, before: TreeResources, folder: Path, owner: Owner) -> None:
        self._before = before
        self._folder = folder
        self._owner = owner
        self._names: dict[str, str] = {}
        """The names of files that are mapped under one that is gone, by the latter."""
        self._open: tuple[OpenFile, ...] = ()
        self._mapped: tuple[MappedFile, ...] = ()
        self._in_memory: tuple[MemoryFile, ...] = ()

    def __enter__(self) -> Self:
        shm_relink.remove_stale_links(self._before.mappings, self._owner)
        return self

    def frozen(self, tree: TreeResources) -> None:
        mappings, own = tree.own_mappings, tree.tree.own
        self._owner = Owner.of(tree.tree)
        opened = file_records.open_files(tree.descriptors, self._owner)
        self._open = tuple(replace(each, pid=own(each.pid)) for each in opened)
        memory = file_records.shared_memory(mappings, self._owner)
        self._mapped = file_records.mapped_files(mappings, memory)
        self._names = shm_relink.names(mappings)
        self._in_memory = file_records.save_memory_files(
            mappings, memory, self._folder, self._names
        )

    def record(self, details: CpuDetails) -> CpuDetails:
        return replace(
            details,
            open_files=self._open,
            mapped_files=self._mapped,
            memory_files=self._in_memory,
        )

    def complete(self) -> None:
        shm_relink.relink(self._folder, self._names, self._owner)
