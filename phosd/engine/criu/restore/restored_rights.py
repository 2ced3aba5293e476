"""The rights of a restored tree: those that its image has, and those that CRIU has given it."""

from phosd.engine.criu.images.rights import Rights
from phosd.engine.criu.restore.restored_processes import RestoredProcesses
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.run.part import CriuPart
from phosd.errors import ImageCorrupt, NotAuthorized


def saved_rights(tree: SavedTree) -> Rights:
    """Return the rights that CRIU would give the tree: a user's are no more than the user has.

    Raises :class:`NotAuthorized`, and :class:`ImageCorrupt` for a thread that is not listed.
    """
    rights = Rights.in_images(tree.folder)
    if not tree.user.is_root:
        rights.require_plain(tree.user)
    if tree.details.imported and (hidden := rights.of.keys() - tree.ids):
        raise ImageCorrupt(
            f"CRIU would make a thread {min(hidden)}, which the image does not list",
            hint="the image cannot be restored; delete it",
        )
    return rights


class SameRights(CriuPart):
    """Compares what CRIU has given a user's tree with the saved ``rights``.

    CRIU's restorer works in memory that the user may change.
    """

    def __init__(self, tree: SavedTree, rights: Rights, processes: RestoredProcesses) -> None:
        self._compared = not tree.user.is_root
        self._rights = rights
        self._processes = processes

    def require(self) -> None:
        """Raise :class:`NotAuthorized` if they differ; the processes are killed then."""
        if not self._compared:
            return
        try:
            self._rights.require_restored(Rights.known_to_kernel(self._processes.ids()))
        except NotAuthorized:
            self._processes.kill()  # before CRIU, which holds them, ends
            raise

    def held(self) -> None:
        self.require()

    def complete(self) -> None:
        """Look again: a user who kills the action script makes CRIU skip :meth:`held`."""
        self.require()
