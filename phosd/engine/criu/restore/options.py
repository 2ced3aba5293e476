"""Options of the restore of one tree."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.restore.clone import Clone
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.image.cpu_manifest import Cgroups
from phosd.engine.system.procfs import ProcessId


@dataclass(frozen=True)
class TreeRestoreOptions:
    """Options for one tree. ``files``: the policy for files that have grown since the checkpoint.

    ``output``: the file for what the program prints, if its output was a pipe, a terminal or a
    socket (None: it is discarded). ``end``: the file that is to tell how the root process ends.
    ``follower``: the process that waits for that.
    ``deadline`` in seconds. ``pid_namespace``: the tree gets one of its own, also if it was in
    none. ``image``: which is restored, for the record of that. ``clone``: which is restored in the
    tree's place, in such a namespace. ``cgroups``: where it goes on, if not where it was.
    ``memory``: descriptors of the device memory that the tree had open, by name. ``rehearsed``: see
    :func:`~phosd.engine.criu.restore.restore.rehearse_tree`.
    """

    files: Policy = Policy.ROLLBACK
    output: Path | None = None
    end: Path | None = None
    follower: ProcessId | None = None
    deadline: float = 600.0
    pid_namespace: bool = False
    image: str = ""
    clone: Clone | None = None
    cgroups: Cgroups | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    rehearsed: bool = False


def in_own_namespace(tree: SavedTree, options: TreeRestoreOptions) -> bool:
    """Return whether the tree is restored in a pid namespace of its own."""
    return tree.record.pid_namespace or options.pid_namespace or options.clone is not None
