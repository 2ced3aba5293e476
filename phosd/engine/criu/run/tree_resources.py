"""Read what the processes of a tree have open and mapped, the GPU driver's devices apart."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from phosd.engine.criu.run.driver_devices import DriverDevices
from phosd.engine.criu.run.memory_handles import MemoryHandle, may_be_memory, named
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import procfs
from phosd.engine.system.procfs import Descriptor, Mapping
from phosd.errors import Reason, Unsupported

Place = tuple[int | str, ...]
"""Where a device is in a process: a descriptor's number or addresses, and the path."""
ONE_USER = "on a file system (FUSE) that is for its user alone"


@dataclass(frozen=True)
class TreeResources:
    """What the processes of a tree have open and mapped. ``handles`` are those of device memory
    that may be open, too.
    """

    tree: ProcessTree
    descriptors: list[Descriptor]
    mappings: list[Mapping]
    handles: Sequence[MemoryHandle] = ()

    @cached_property
    def of_memory(self) -> list[Descriptor]:
        """The descriptors of exported device memory, with its name as their target."""
        devices = DriverDevices.here()
        candidates = [
            *devices.open_in(self.descriptors),
            *(each for each in self.descriptors if may_be_memory(each)),
        ]
        return [*named(candidates, self.handles)]

    @cached_property
    def of_driver(self) -> list[Descriptor | Mapping]:
        """What is open and mapped of the GPU driver's devices, without exported memory."""
        devices = DriverDevices.here()
        opened = devices.open_in(self.descriptors)
        return [
            *(each for each in opened if _place(each) not in self._places_of_memory),
            *devices.mapped_in(self.mappings),
        ]

    @cached_property
    def _places_of_memory(self) -> frozenset[tuple[int, int]]:
        return frozenset(map(_place, self.of_memory))

    @property
    def users_of_driver(self) -> frozenset[int]:
        """The processes with such a descriptor or mapping."""
        return frozenset(each.pid for each in self.of_driver)

    @cached_property
    def of_management(self) -> list[Descriptor]:
        """What processes have open of the driver's devices for NVML, which maps nothing of them.

        CUDA, OpenGL and Vulkan do; the driver's checkpoint takes CUDA's away.
        """
        mapped = {each.pid for each in self.of_driver if isinstance(each, Mapping)}
        users = {each.pid for each in self.mappings if "/libnvidia-ml.so" in each.path} - mapped
        opened = (each for each in self.of_driver if isinstance(each, Descriptor))
        return [each for each in opened if each.pid in users]

    def places_of_driver(self) -> dict[Place, int]:
        """Return a process for each descriptor and mapping of the driver's devices: by number or
        addresses, and by path. What a process inherits is where it was in its parent.
        """
        return {
            (each.number, each.target)
            if isinstance(each, Descriptor)
            else (each.start, each.end, each.path): each.pid
            for each in self.of_driver
        }

    @cached_property
    def own_descriptors(self) -> list[Descriptor]:
        """The descriptors without those of the driver's devices and of device memory."""
        without = {id(each) for each in self.of_driver}
        return [
            each
            for each in self.descriptors
            if id(each) not in without and _place(each) not in self._places_of_memory
        ]

    @cached_property
    def own_mappings(self) -> list[Mapping]:
        """The mappings without those of the driver's devices."""
        without = {id(each) for each in self.of_driver}
        return [each for each in self.mappings if id(each) not in without]

    @classmethod
    def of(cls, tree: ProcessTree, handles: Sequence[MemoryHandle] = ()) -> Self:
        """Read the descriptors and mappings of every living process of the tree.

        Raises :class:`Unsupported` for an open file that root may not look at.
        """
        found = cls(tree, [], [], handles)
        for process in tree.living:
            # The process has ended.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                try:
                    found.descriptors.extend(procfs.descriptors(process.pid))
                except PermissionError as error:
                    raise Unsupported(
                        f"{procfs.describe(process.pid)} uses {error.filename}, {ONE_USER}",
                        hint="close it, or mount that with the option allow_root or allow_other",
                        reason=Reason.CLOSED_MOUNT,
                    ) from error
                found.mappings.extend(procfs.mappings(process.pid))
        return found


def _place(descriptor: Descriptor) -> tuple[int, int]:
    return descriptor.pid, descriptor.number
