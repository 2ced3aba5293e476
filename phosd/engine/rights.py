"""Who may save a process tree and who may restore an image: what is in it runs as its owner."""

from phosd.engine.errors import NotAuthorized
from phosd.engine.image.manifest import Manifest
from phosd.engine.procfs import describe
from phosd.engine.tree import ProcessTree

ROOT = 0


def require_may_save(tree: ProcessTree, caller: int) -> None:
    """Raise :class:`NotAuthorized` unless user ``caller`` owns the whole tree, or is root."""
    if caller == ROOT:
        return
    why = tree.privileged
    if tree.root.uid != caller:
        why = f"{describe(tree.root.pid)} belongs to uid {tree.root.uid}"
    if why:
        raise NotAuthorized(
            f"uid {caller} may not save the tree of process {tree.root.pid}: {why}",
            hint="ask as root",
        )


def require_may_restore(manifest: Manifest, caller: int) -> None:
    """Raise :class:`NotAuthorized` unless all of the image is of user ``caller``, or it is root."""
    if caller == ROOT:
        return
    reasons = [tree.details.privileged for tree in manifest.trees if tree.details is not None]
    why = "; ".join(filter(None, reasons))
    others = {process.uid for process in manifest.processes} - {caller}
    if others:
        why = f"it holds processes of uid {min(others)}"
    if why:
        raise NotAuthorized(
            f"uid {caller} may not restore image {manifest.id}: {why}", hint="ask as root"
        )
