"""Say how this phosd was installed, and so how to get a package that it can do without."""

import sys
from enum import Enum, auto
from pathlib import Path

_HERE = Path(__file__).parent
_PACKAGE = Path("/usr/lib/phos/python/phosd")


class Kind(Enum):
    """How phosd came to this machine."""

    PACKAGE = auto()
    """As a package of the system, whose Python takes packages from the system alone."""
    CHECKOUT = auto()
    """As its sources, with an environment of their own."""
    WHEEL = auto()
    """Into an environment, by pip."""


def kind() -> Kind:
    """Return how the phosd that runs here was installed."""
    if _HERE == _PACKAGE:
        return Kind.PACKAGE
    return Kind.CHECKOUT if (_HERE.parent / "pyproject.toml").exists() else Kind.WHEEL


def how_to_get(extra: str, *, packaged: str) -> str:
    """Return what gets the packages of an extra for this phosd: ``packaged`` where it is a package
    of the system.
    """
    match kind():
        case Kind.PACKAGE:
            return f"`{packaged}` as root"
        case Kind.CHECKOUT:
            return f"`make setup` in {_HERE.parent}"
        case Kind.WHEEL:
            return f"`{sys.executable} -m pip install 'phosd[{extra}]'`"
