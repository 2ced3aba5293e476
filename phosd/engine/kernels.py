"""Kernels as hook, history and boards name them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelMark:
    """A kernel, by its name and the hash of the module it is from (0 when that is not known)."""

    name: str
    module: int
