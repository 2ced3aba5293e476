"""The GPU driver's devices that a dumped tree still has: inherited by forks, opened for NVML, or
exported device memory.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from phosd.engine.criu.dump.preflight import require_inherited
from phosd.engine.criu.images.inert_devices import make_inert
from phosd.engine.criu.run.driver_devices import DriverDevices
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.system.procfs import Descriptor


class DriverFiles(CriuPart):
    """Lets CRIU note the devices, and makes what it notes in ``folder`` inert.

    ``before`` is the tree while it ran: a device at a new place may be the beginning of CUDA.
    """

    def __init__(self, before: TreeResources, folder: Path) -> None:
        self._devices = DriverDevices.here()
        self._known = before.places_of_driver()
        self._folder = folder
        self._frozen: TreeResources | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        return self._devices.environment

    @property
    def plugged(self) -> bool:
        return bool(self._devices.kinds)

    @property
    def inheritors(self) -> frozenset[int]:
        """The processes that had devices when frozen, which are restored as inert."""
        return self._frozen.users_of_driver if self._frozen is not None else frozenset()

    def frozen(self, tree: TreeResources) -> None:
        """Raises :class:`~phosd.errors.Busy` if a process may be about to begin to use CUDA."""
        require_inherited(tree, self._known)
        self._frozen = tree

    def record(self, details: CpuDetails) -> CpuDetails:
        if self._frozen is None:
            return details
        return replace(
            details,
            devices=_targets(self._frozen.of_management),
            device_memory=_targets(self._frozen.of_memory),
        )

    def complete(self) -> None:
        """Raises :class:`~phosd.errors.Unsupported` for a device on its way through a socket."""
        tree = self._frozen
        if tree is not None and (self._devices.kinds or tree.of_memory):
            make_inert(self._folder, (*tree.of_management, *tree.of_memory), tree.tree.own)


def _targets(descriptors: Iterable[Descriptor]) -> tuple[str, ...]:
    return tuple(sorted({each.target for each in descriptors}))
