"""Exported device memory that a program has open: a descriptor of the driver's control device,
which names the memory.

PyTorch keeps such descriptors for its expandable segments. In CRIU's images they are files whose
names stand for blocks; a restore gives CRIU a descriptor of the loaded memory in their place.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from phosd.engine.system.kcmp import same_file
from phosd.engine.system.procfs import Descriptor

_NAME = re.compile(r"/dev/device-memory/([1-9][0-9]{0,9})/([0-9]{1,20})")
_OF_THE_SOFTWARE_GPU = "/memfd:phos-softgpu-"
"""A device's open file cannot be memory, too, so its exported memory has another kind of file."""


@dataclass(frozen=True)
class MemoryName:
    """The name of a block's memory in an image: the pid that the process has for itself, and the
    block's id.
    """

    pid: int
    block: int

    def __str__(self) -> str:
        return f"/dev/device-memory/{self.pid}/{self.block}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name that a text is; None if it is none."""
        found = _NAME.fullmatch(text)
        return cls(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class MemoryHandle:
    """Memory with a name, and this process's own descriptor of it."""

    name: MemoryName
    descriptor: int

    def is_open_as(self, other: Descriptor) -> bool:
        """Return whether a descriptor of a process is the same export of this memory."""
        return same_file(self.descriptor, other.number, other.pid)


def may_be_memory(descriptor: Descriptor) -> bool:
    """Return whether a descriptor may be exported memory of the software GPU."""
    return descriptor.target.startswith(_OF_THE_SOFTWARE_GPU)


def named(
    descriptors: Iterable[Descriptor], handles: Sequence[MemoryHandle]
) -> Iterator[Descriptor]:
    """Yield the descriptors that are exported memory, with its name as their target."""
    for each in descriptors:
        for handle in handles:
            if handle.is_open_as(each):
                yield replace(each, target=str(handle.name))
                break
