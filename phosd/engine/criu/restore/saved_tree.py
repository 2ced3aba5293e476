"""Check one tree of an image: the manifest's entry against CRIU's files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from phosd.engine.criu.images.digests import digests
from phosd.engine.criu.kinds import registry
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.image import private_files
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.image.manifest import Manifest, Process, Tree
from phosd.errors import ImageCorrupt


@dataclass(frozen=True)
class SavedTree:
    """A tree of an image: its ``record``, its ``processes``, and CRIU's files in ``folder``.

    Properties and methods raise :class:`ImageCorrupt`.
    """

    record: Tree
    processes: Sequence[Process]
    folder: Path

    @property
    def details(self) -> CpuDetails:
        """What CRIU does not save of the tree."""
        return _details(self.record)

    @property
    def user(self) -> Owner:
        """The user that CRIU runs as."""
        return restoring_user(self.record)

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all processes and threads, as they were saved."""
        return frozenset(n for each in self.processes for n in (each.pid, *each.threads))

    def check_listing(self) -> None:
        """Require exactly the recorded files in the folder, of the recorded sizes, and no links.

        Raises :class:`NotAuthorized` for a file that others own or may open.
        """
        recorded = {file.path: file.size for file in self.record.files}
        for name in recorded:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ImageCorrupt(f"the image names a file outside of it: {name!r}", "delete it")
        registry.require_sound(self.details, recorded)
        found = {
            str(path.relative_to(self.folder)): path.lstat()
            for path in self.folder.rglob("*")
            if path.is_symlink() or not path.is_dir()
        }
        for name in sorted(recorded.keys() | found.keys()):
            status = found.get(name)
            regular = status is not None and (status.st_mode & 0o170000) == 0o100000
            if status is None or not regular or status.st_size != recorded.get(name):
                raise ImageCorrupt(
                    f"{self.folder / name} is missing, of another size, or not part of the image",
                    hint="restore another image; this one is damaged",
                )
            os.close(private_files.open_private(self.folder / name, os.O_RDONLY))

    def check_bytes(self) -> None:
        """Hash every file of the dump. Raises, naming the first that differs."""
        recorded = {file.path: file for file in self.record.files}
        for found in digests(self.folder):
            if recorded.get(found.path) != found:
                raise ImageCorrupt(
                    f"{self.folder / found.path} is not what was saved",
                    hint="restore another image; this one is damaged",
                )


def saved_trees(manifest: Manifest, folder: Path) -> list[SavedTree]:
    """Return the trees of an image, whose files are in ``folder``."""
    return [
        SavedTree(tree, [p for p in manifest.processes if p.tree == number], folder / tree.folder)
        for number, tree in enumerate(manifest.trees)
    ]


def restoring_user(tree: Tree) -> Owner:
    """Return the user that CRIU runs as to restore ``tree``. Raises :class:`ImageCorrupt`."""
    details = _details(tree)
    if details.privileged:
        return Owner(0, 0, ())
    return Owner(details.uid, details.gid, details.groups)


def _details(tree: Tree) -> CpuDetails:
    if tree.details is None:
        raise ImageCorrupt(
            f"the image says nothing about the tree of pid {tree.root}", "restore another image"
        )
    return tree.details
