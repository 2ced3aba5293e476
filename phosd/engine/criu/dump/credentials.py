"""The credentials of a dumped tree: those that the kernel knows, against those in CRIU's files."""

from pathlib import Path

from msgspec.structs import replace

from phosd.engine.criu.images import rseq_areas
from phosd.engine.criu.images.rights import Rights
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import audit


class Credentials(CriuPart):
    """Compares what CRIU has recorded in ``folder`` with what the kernel said of the frozen tree.

    CRIU reads it in the program's memory, where the user may have written something else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rights = Rights({})
        self._loginuid: int | None = None

    def frozen(self, tree: TreeResources) -> None:
        self._rights = Rights.known_to_kernel(tree.tree.ids)
        require_plain(tree.tree, self._rights)
        self._loginuid = audit.loginuid(tree.tree.root.pid)

    def record(self, details: CpuDetails) -> CpuDetails:
        return replace(details, loginuid=self._loginuid)

    def complete(self) -> None:
        """Raises :class:`~phosd.errors.NotAuthorized` if CRIU recorded others, and
        :class:`~phosd.errors.Unsupported` for an area of restartable sequences in memory to which
        others may write.
        """
        self._rights.require_equal(Rights.in_images(self._folder))
        if not self._rights.are_root_s:
            rseq_areas.require_own(self._folder)


def require_plain(tree: ProcessTree, rights: Rights) -> None:
    """Require that all threads of a user's program have only the user's credentials."""
    user = Owner.of(tree)
    if not user.is_root:
        rights.require_plain(user)
