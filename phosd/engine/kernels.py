"""Kernels as hook, history and boards name them."""

from dataclasses import dataclass

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


@dataclass(frozen=True)
class KernelMark:
    """A kernel, by its name and the hash of the module it is from (0 when that is not known)."""

    name: str
    module: int

    @property
    def name_hash(self) -> int:
        """64-bit FNV-1a of the name, as ``board.h`` has it."""
        value = _FNV_OFFSET
        for byte in self.name.encode():
            value = (value ^ byte) * _FNV_PRIME & (1 << 64) - 1
        return value
