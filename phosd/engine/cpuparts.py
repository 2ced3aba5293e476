"""CRIU's files of a unit: in memory while the program stands still, in the image when it runs."""

import shutil
from pathlib import Path

from phosd.engine import criu
from phosd.engine.criu import Criu, DumpOptions, TreeDump
from phosd.engine.image import files
from phosd.engine.image.manifest import Tree
from phosd.engine.image.writer import ImageWriter
from phosd.engine.progress import Progress
from phosd.engine.tree import ProcessTree


class CpuParts:
    """One dump a tree. ``staging`` is a folder in memory, or None to write to the disk at once."""

    def __init__(
        self, program: Criu, writer: ImageWriter, staging: Path | None, options: DumpOptions
    ) -> None:
        self._program = program
        self._writer = writer
        self._base = staging or writer.folder
        self._options = options
        self._dumps: list[TreeDump] = []

    def dump(self, trees: list[ProcessTree], progress: Progress) -> None:
        """Freeze each tree, write its state, let it go on."""
        for index, tree in enumerate(trees):
            folder = self._base / f"criu-{index}"
            folder.mkdir(mode=0o700)
            dumped = criu.dump_tree(self._program, tree, folder, self._options, progress)
            self._dumps.append(dumped)

    @property
    def trees(self) -> list[ProcessTree]:
        """The trees as they were when frozen."""
        return [dump.tree for dump in self._dumps]

    def persist(self) -> tuple[Tree, ...]:
        """Bring everything to the disk; the manifest's entries."""
        records = []
        for dump in self._dumps:
            name = dump.folder.name
            if self._base != self._writer.folder:
                with files.space_errors(f"the files of image {self._writer.id}"):
                    _copy_tree(dump.folder, self._writer.folder / name)
                shutil.rmtree(dump.folder)
            digests = self._writer.seal(name)
            records.append(Tree(dump.tree.root.pid, name, digests, dump.details))
        return tuple(records)


def _copy_tree(source: Path, target: Path) -> None:
    """Like :func:`shutil.copytree`, but the first error is raised as it is, and at once."""
    target.mkdir(mode=0o700)
    for entry in source.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            _copy_tree(entry, target / entry.name)
        else:
            shutil.copyfile(entry, target / entry.name, follow_symlinks=False)
