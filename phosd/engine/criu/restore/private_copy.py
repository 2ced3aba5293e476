"""Give a restore CRIU's files with changes in some of them; the image's stay as they are.

The others are links to the image's, which are hashed while CRIU works. A file is compared with its
digest before it is changed: what is made of it has none.
"""

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from phosd.engine.criu.images.image_file import Change, rewrite
from phosd.engine.criu.kinds.named_files import without_sizes
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.image.private_files import file_digest, open_private
from phosd.engine.system.removal import remove_trees
from phosd.errors import ImageCorrupt, Internal

FILES = "files.img"
_FOLDER = "copy-"


@contextlib.contextmanager
def private_copy(tree: SavedTree, change: Change) -> Iterator[SavedTree]:
    """Yield the tree with a folder of its own, beside the image's, in which every entry of
    ``files.img`` is changed.

    Raises :class:`ImageCorrupt` if that is not the recorded file.
    """
    with own_copy(tree) as copy:
        require_as_saved(copy, FILES)
        rewrite(copy.folder / FILES, change)
        yield copy


def take_any_size(copy: SavedTree) -> None:
    """Let CRIU open the files of a tree that has a folder of its own whatever their sizes are."""
    rewrite(copy.folder / FILES, without_sizes)


@contextlib.contextmanager
def own_copy(tree: SavedTree) -> Iterator[SavedTree]:
    """Yield the tree with a folder of its own, as :func:`linked_copy` does, for a restore that
    cannot do without. Raises :class:`Internal`.
    """
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(linked_copy(tree))
        except OSError as error:
            raise Internal(
                f"links to CRIU's files cannot be made in {tree.folder.parent}: {error.strerror}",
                hint="clones, rehearsals, and programs of users without all capabilities in their "
                "bounding set need images on a file system that has hard links, and room",
            ) from error
        yield copy


@contextlib.contextmanager
def linked_copy(tree: SavedTree) -> Iterator[SavedTree]:
    """Yield the tree with a folder of its own, beside the image's, of links to CRIU's files.

    Raises :class:`OSError` where there are no hard links, or no room.
    """
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=tree.folder.parent))
    try:
        for file in tree.record.files:
            (folder / file.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.link(tree.folder / file.path, folder / file.path, follow_symlinks=False)
        yield replace(tree, folder=folder)
    finally:
        remove_trees([folder])


def remove_left(folder: Path, trees: Collection[str]) -> None:
    """Remove what a killed phosd has left in an image's folder: such copies, and CRIU's working
    folders. ``trees`` are the names of those that belong to it.
    """
    for left in folder.iterdir():
        if left.name not in trees and left.is_dir() and not left.is_symlink():
            remove_trees([left])


def require_as_saved(tree: SavedTree, name: str) -> None:
    """Raise :class:`ImageCorrupt` if CRIU's file with this name is not the recorded one."""
    descriptor = open_private(tree.folder / name, os.O_RDONLY)
    try:
        found = file_digest(descriptor)
    finally:
        os.close(descriptor)
    if found not in {file.sha256 for file in tree.record.files if file.path == name}:
        raise ImageCorrupt(
            f"{tree.folder / name} is not what was saved",
            hint="restore another image; this one is damaged",
        )
