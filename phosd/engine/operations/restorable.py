"""Check an image before it is published: nobody needs one that cannot be restored."""

from pathlib import Path

from phosd.engine.criu.restore import admission
from phosd.engine.criu.restore.saved_tree import saved_trees
from phosd.engine.image.manifest import Manifest
from phosd.engine.node.machine import require_same_machine
from phosd.engine.node.node import Node


def require_restorable(node: Node, manifest: Manifest, folder: Path) -> None:
    """Check what a restore on this node checks, except what may change until then.

    ``folder`` has CRIU's files. Raises what the restore would.
    """
    require_same_machine(manifest, node.criu, node.config.runtime_dir)
    for tree in saved_trees(manifest, folder):
        admission.require_restorable(node.criu, tree)
