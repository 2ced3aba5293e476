"""Tell the GPU driver's devices from other files.

A process that uses CUDA has them open and mapped, and so has what it forks, which cannot use them.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phosd.engine.criu.run.invocation import Owner
from phosd.engine.system import procfs
from phosd.engine.system.file_status import known_status
from phosd.engine.system.procfs import Descriptor, Mapping

_DRIVER = "nvidia"
_PLACE = re.compile(r"/dev/(nvidia-caps/)?nvidia[\w-]*")
_PRETENDED = "PHOS_SOFTGPU_DEVICE_FILE"
_KINDS = {"Character devices:": "c", "Block devices:": "b"}


@dataclass(frozen=True)
class DriverDevices:
    """The devices of the GPU driver, as ``c`` or ``b`` with the major number, such as ``c195``."""

    kinds: frozenset[str]

    @classmethod
    def here(cls) -> Self:
        """Return those of this machine. The software GPU has the device that its user names."""
        found = frozenset(_registered((procfs.PROC / "devices").read_text()))
        pretended = os.environ.get(_PRETENDED, "")
        exists = pretended and Path(pretended).exists()
        kinds = {_kind(Path(pretended).stat())} if exists else set()
        return cls((found | kinds) - {""})

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable that tells CRIU's plugin."""
        return {"PHOS_DRIVER_DEVICES": " ".join(sorted(self.kinds))}

    def has(self, file: os.stat_result) -> bool:
        """Return whether a file is one of the devices."""
        return bool(self.kinds) and _kind(file) in self.kinds

    def openable(self, path: str, owner: Owner) -> bool:
        """Return whether it is one of the devices, and ``owner`` may open it."""
        if path != os.environ.get(_PRETENDED) and not _PLACE.fullmatch(path):
            return False
        try:
            file = Path(path).lstat()
        except FileNotFoundError:
            return False
        return self.has(file) and owner.may(0o6, file)

    def open_in(self, descriptors: Iterable[Descriptor]) -> Iterator[Descriptor]:
        """Yield the descriptors of the devices."""
        return (each for each in descriptors if self.has(each.file))

    def mapped_in(self, mappings: Iterable[Mapping]) -> Iterator[Mapping]:
        """Yield the mappings of the devices."""
        known: dict[tuple[int, int], bool] = {}
        for mapping in mappings:
            if not mapping.path.startswith("/"):
                continue
            file = (mapping.device, mapping.inode)
            if file not in known:
                try:
                    known[file] = self.has(known_status(mapping.link))
                # It has ended, or unmapped it; the file system is a user's own.
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
            if known[file]:
                yield mapping


def _registered(text: str) -> Iterator[str]:
    """Yield the driver's entries of ``/proc/devices``."""
    kind = ""
    for line in text.splitlines():
        kind = _KINDS.get(line, kind)
        major, _, name = line.strip().partition(" ")
        if kind and name.startswith(_DRIVER) and major.isdecimal():
            yield f"{kind}{major}"


def _kind(file: os.stat_result) -> str:
    letter = "c" if stat.S_ISCHR(file.st_mode) else "b" if stat.S_ISBLK(file.st_mode) else ""
    return f"{letter}{os.major(file.st_rdev)}" if letter else ""
