"""Which mode a checkpoint runs in."""

from dataclasses import dataclass

from phosd.engine.checkpoint.options import CheckpointOptions
from phosd.engine.errors import Unsupported
from phosd.engine.node import Node
from phosd.engine.unit import Unit


@dataclass(frozen=True)
class Choice:
    """A mode, and why it was chosen; an empty text when the caller named it."""

    mode: str
    why: str = ""


def choose(node: Node, unit: Unit, options: CheckpointOptions) -> Choice:
    """The mode to begin with. Raises :class:`Unsupported` when the one that is wanted cannot be."""
    why_not = unit.why_not_parked()
    choice = Choice(options.mode)
    if options.mode == "auto":
        choice = Choice("driver", why_not) if why_not else _among_parking(node, unit, options)
    elif options.mode != "driver" and why_not:
        raise Unsupported(f"mode {options.mode} is not possible: {why_not}", hint="use mode=driver")
    if choice.mode == "driver" and (why_not := unit.why_not_by_driver()):
        raise Unsupported(f"mode driver is not possible: {why_not}", hint="use mode=stop")
    return choice


def _among_parking(node: Node, unit: Unit, options: CheckpointOptions) -> Choice:
    return Choice("concurrent", "the hook can park the device memory and copy it afterwards")
