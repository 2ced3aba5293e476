"""Say what a run of CRIU is to do, and as whom."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phosd.engine.criu.run.cgroup_place import Place
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.engine.system.privileges import Capability


@dataclass(frozen=True)
class Owner:
    """The user that owns a program, in numeric ids."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, tree: ProcessTree) -> Self:
        """Return the user that CRIU dumps a tree as: its owner, or root if it has several."""
        if tree.privileged:
            return cls(0, 0, ())
        return cls(tree.root.uid, tree.root.gid, tree.root.groups)

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    def may(self, needed: int, file: os.stat_result) -> bool:
        """Return whether a file's mode gives these rights to the user: 4 to read, 2 to write."""
        shift = 0
        if self.uid == file.st_uid:
            shift = 6
        elif file.st_gid in (self.gid, *self.groups):
            shift = 3
        return self.is_root or file.st_mode >> shift & needed == needed


@dataclass(frozen=True)
class Invocation:
    """A run of ``criu action words`` as ``owner``.

    The folders ``images`` and ``work`` may be inside private ones. ``descriptors`` are inherited;
    ``environment`` is added to CRIU's, which loads the plugins of the folder ``plugins`` and no
    others; ``capabilities`` are all that CRIU has, unless the owner is
    root. ``wrap`` may put a command around CRIU's. ``place``: see :func:`launch.launch`.
    ``inside``: the namespace that it runs in, and those that come with it. ``bounding``,
    ``bounded`` and ``loginuid``: see :func:`privileges.command`.
    """

    action: str
    words: Sequence[str]
    owner: Owner
    images: Path
    work: Path
    descriptors: Sequence[int] = ()
    environment: Mapping[str, str] | None = None
    capabilities: Collection[Capability] = (Capability.CHECKPOINT_RESTORE,)
    bounding: int | None = None
    dies_with_us: bool = False
    place: Place | None = None
    plugins: Path | None = None
    inside: PidNamespace | None = None
    bounded: bool = False
    loginuid: int | None = None
    wrap: Callable[[list[str]], list[str]] = list
