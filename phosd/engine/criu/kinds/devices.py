"""Devices: those that are not the GPU driver's, open and mapped, and its names in a manifest."""

import os
import stat
from collections.abc import Collection, Iterator

from phosd.engine.criu.images.fields import FileEntry
from phosd.engine.criu.images.saved_files import SavedFiles
from phosd.engine.criu.kinds.device_memory import DeviceMemory
from phosd.engine.criu.kinds.kind import Choices, FileKind, Restoring, Sizes, place
from phosd.engine.criu.kinds.placeholder_devices import PlaceholderDevices
from phosd.engine.criu.run.memory_handles import MemoryName
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.errors import ImageCorrupt

MOST_DEVICES = 64
"""Most devices of the driver in a manifest: a descriptor of each may be passed to CRIU."""
_MEMORY = 1
_TERMINALS = (4, 5, *range(136, 144))
"""Major numbers."""
_TUN = os.makedev(10, 200)
_NO_DEVICES = ("/dev/shm/", "/dev/hugepages/", "/dev/zero", "/dev/mem")
"""What is below ``/dev`` and can be mapped."""


class Devices(FileKind):
    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        for descriptor in tree.own_descriptors:
            mode, device = descriptor.file.st_mode, descriptor.file.st_rdev
            if stat.S_ISBLK(mode):
                yield f"{place(descriptor)} is a block device"
            elif stat.S_ISCHR(mode) and not _is_saved(device):
                yield f"{place(descriptor)} is a device that cannot be saved"
        for mapping in tree.own_mappings:
            path = mapping.path
            device = path.startswith("/dev/") and not path.startswith(_NO_DEVICES)
            if path.startswith("anon_inode:") or device:
                yield f"pid {mapping.pid} maps {path}, which cannot be saved"

    def restore_parts(self, restoring: Restoring) -> Iterator[CriuPart]:
        yield PlaceholderDevices(restoring.details.devices, restoring.owner)
        yield DeviceMemory(restoring.details.device_memory, restoring.memory)

    def require_sound(self, details: CpuDetails, sizes: Sizes) -> None:
        if len(details.devices) > MOST_DEVICES:
            raise ImageCorrupt("the image names more devices than a machine has", "delete it")
        for name in details.device_memory:
            if MemoryName.parse(name) is None:
                raise ImageCorrupt(f"the image names no device memory by {name!r}", "delete it")

    def taken(
        self, files: SavedFiles, details: CpuDetails, moved: Collection[int]
    ) -> Iterator[str]:
        if any(True for _ in files.of(FileEntry.TUNF)):
            yield "a network device (TUN)"


def _is_saved(device: int) -> bool:
    major = os.major(device)
    return major == _MEMORY or major in _TERMINALS or device == _TUN
