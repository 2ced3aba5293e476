"""Export names of a package's modules without importing those modules before they are used."""

import importlib
import sys
from collections.abc import Callable, Mapping


def lazily(
    package: str, modules: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package that exports these names of its
    ``modules``, which are named relative to it.

    A start of phosd or of a command would otherwise take what all the others need.
    """
    where = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{where[name]}"), name)

    def names() -> list[str]:
        of_every_module = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*where, *of_every_module})

    return get, names
