"""Let a container's runtime save processes that have the GPU driver's devices, as forks of a
GPU process do, and users of NVML.

Its CRIU is told by phosd's plugin to note them, and phosd takes them out of its images, as out of
those of its own CRIU (``inert_devices.py``): the restore needs nothing for it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phosd.engine.criu.dump.preflight import require_inert, require_inherited
from phosd.engine.criu.images.inert_devices import make_inert
from phosd.engine.criu.run.driver_devices import DriverDevices
from phosd.engine.criu.run.tree_resources import Place, TreeResources
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system.procfs import Descriptor


@dataclass(frozen=True)
class RuntimeDevices:
    """What a tree that CRIU holds has of the driver's devices.

    ``kinds`` are those of the devices, such as ``c195 c238``: all that CRIU is to note. ``users``
    have some of them.
    """

    tree: ProcessTree
    kinds: str
    users: frozenset[int] = frozenset()
    reopened: tuple[Descriptor, ...] = ()

    @classmethod
    def of(cls, tree: ProcessTree, checkpointed: Collection[int], known: Collection[Place]) -> Self:
        """Look at a tree of which the driver has ``checkpointed`` some processes, and in which the
        devices were at ``known`` places (:func:`places`) before.

        Raises :class:`~phosd.errors.Unsupported` if others use the GPU, and
        :class:`~phosd.errors.Busy` if one may have begun to.
        """
        kinds = " ".join(sorted(DriverDevices.here().kinds))
        if not kinds:
            return cls(tree, kinds)
        found = TreeResources.of(tree)
        require_inert(found, checkpointed)
        require_inherited(found, known)
        return cls(tree, kinds, found.users_of_driver, tuple(found.of_management))

    def take_out(self, folder: int) -> None:
        """Change the images of the tree, which CRIU has written to an open ``folder``.

        Raises :class:`~phosd.errors.Unsupported` for a device that is on its way through a socket.
        """
        if self.kinds:
            make_inert(Path(f"/proc/self/fd/{folder}"), self.reopened, self.tree.own)


def places(tree: ProcessTree) -> frozenset[Place]:
    """Return where a running tree has the driver's devices."""
    if not DriverDevices.here().kinds:
        return frozenset()
    return frozenset(TreeResources.of(tree).places_of_driver())
