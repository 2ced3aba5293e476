"""Rehearse a restore: have CRIU make a tree, of which nothing ever runs, and throw it away.

Everything is made in namespaces of its own (pid, mount, network, IPC), so ports and abstract names
of sockets are free. What else the program has open to write to is a path: files, named memory,
pipes and deleted files are replaced by empty ones of the same size in the rehearsal's folder, and
sockets with a path by abstract ones. Locks on files, which the original may have, are left out.
So nothing that the original has is touched.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from phosd.engine.criu.images.image_file import ImageFile
from phosd.engine.criu.images.saved_files import SavedFiles
from phosd.engine.criu.kinds import registry
from phosd.engine.criu.kinds.locks import LOCKS
from phosd.engine.criu.kinds.stand_ins import StandIns
from phosd.engine.criu.restore.private_copy import private_copy, take_any_size
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.errors import Reason, Unsupported


class Rehearsal:
    """A rehearsal of ``tree``'s restore, with files in ``scratch``, which is a root folder.
    ``as_is``: the restore would take the program's files whatever their sizes are.
    """

    def __init__(self, tree: SavedTree, scratch: Path, *, as_is: bool = False) -> None:
        self.tree = tree
        self._scratch = scratch
        self._as_is = as_is

    @cached_property
    def _saved(self) -> SavedFiles:
        return SavedFiles(self.tree.folder)

    def require_possible(self) -> None:
        """Raise :class:`Unsupported` for what a restore uses up."""
        if links := self._saved.linked():
            raise Unsupported(
                f"the program has {links[0]} open, which was deleted while it had another name: a "
                "restore uses up what was saved of that",
                hint="the image can be restored; only a rehearsal would leave it damaged",
                reason=Reason.PROCESS_STATE,
            )

    @contextmanager
    def private_copy(self) -> Iterator[SavedTree]:
        """Yield the tree with CRIU's files as the rehearsal needs them, and make what these name.

        The folder is the owner's then: root opens nothing there.
        """
        owner = self.tree.user
        self._scratch.chmod(0o711)  # another one cannot list it
        files = self._scratch / "files"
        files.mkdir(mode=0o700)
        in_memory = {file.path for file in self.tree.details.memory_files}
        stand_ins = StandIns(files, owner, self._saved, in_memory)
        with private_copy(self.tree, partial(registry.in_rehearsal, stand_ins=stand_ins)) as copy:
            locks = copy.folder / LOCKS
            if locks.exists():
                ImageFile(ImageFile.read(locks).magic, ()).write(locks)
            if self._as_is:
                take_any_size(copy)
            os.chown(files, owner.uid, owner.gid)
            try:
                yield copy
            finally:
                os.chown(files, 0, 0)  # nobody adds to it while it is removed
