"""Which mode a checkpoint runs in."""

from dataclasses import dataclass

from phosd.engine.errors import Unsupported
from phosd.engine.unit import Unit

_PARKABLE = "the hook can park the device memory and copy it afterwards"


@dataclass(frozen=True)
class Choice:
    """A mode, and why it was chosen; an empty text when the caller named it."""

    mode: str
    why: str = ""


def choose(unit: Unit, wanted: str) -> Choice:
    """The mode to begin with. Raises :class:`Unsupported` when the one that is wanted cannot be."""
    why_not = unit.why_not_parked()
    choice = Choice(wanted)
    if wanted == "auto":
        choice = Choice("driver", why_not) if why_not else Choice("concurrent", _PARKABLE)
    elif wanted != "driver" and why_not:
        raise Unsupported(f"mode {wanted} is not possible: {why_not}", hint="use mode=driver")
    if choice.mode == "driver" and (why_not := unit.why_not_by_driver()):
        raise Unsupported(f"mode driver is not possible: {why_not}", hint="use mode=stop")
    return choice
