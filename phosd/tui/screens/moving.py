"""Where processes can go: what the dialog of a migration offers, and why there is none."""

from collections.abc import Iterable, Mapping, Sequence

from phosd.tui.node import Node
from phosd.tui.records import Gpu, Process
from phosd.tui.text import human_bytes, plain
from phosd.tui.widgets.dialogs import Choice

SUSPENDED = "suspended"
"""The state of a process that was taken off its GPUs."""
_ONLY = "to"
"""The name of the only question; of several, each is called like the GPU that it is about."""


def why_not_suspend(chosen: Sequence[Process]) -> str:
    """Why the chosen processes can be neither suspended nor resumed; nothing when they can."""
    return next((why for process in chosen if (why := _not_hooked(process))), "")


def why_not_migrate(node: Node, chosen: Sequence[Process]) -> str:
    """Why there is nowhere to go for the chosen processes; nothing when there is."""
    for process in chosen:
        if why := _not_hooked(process):
            return f"{why}; `phos migrate --mode driver` moves it all the same"
        if process.state == SUSPENDED:
            return f"{process.pid} is suspended; `s` brings it back"
        if len(process.gpus) > 1 and len(chosen) > 1:
            return f"{process.pid} is on several GPUs; migrate it by itself"
        if not _others(node, process):
            return f"there is no other GPU of the kind that {process.pid} is on"
    return ""


def choices(node: Node, chosen: Sequence[Process]) -> list[Choice]:
    """What to ask: for each GPU of a process on several, or once. The first place is the one with
    most room.
    """
    first = chosen[0]
    if len(first.gpus) < 2:
        places = {gpu.uuid: gpu for process in chosen for gpu in _others(node, process)}
        return [Choice(_ONLY, "To", _places(node, places.values()))]
    asked = []
    for gpu in _on(node, first):
        others = [other for other in node.gpus if other.name == gpu.name and other != gpu]
        stays = (f"GPU {gpu.ordinal}: it stays", "")
        asked.append(Choice(gpu.uuid, f"GPU {gpu.ordinal} to", [stays, *_places(node, others)]))
    return asked


def destination(given: Mapping[str, str]) -> str:
    """What was chosen, as phosd wants it."""
    return given.get(_ONLY) or ",".join(f"{old}:{new}" for old, new in given.items() if new)


def _not_hooked(process: Process) -> str:
    return "" if process.hook == "hooked" else f"{process.pid} was not started with `phos run`"


def _on(node: Node, process: Process) -> list[Gpu]:
    return [gpu for gpu in node.gpus if gpu.path in process.gpus]


def _others(node: Node, process: Process) -> list[Gpu]:
    """The GPUs that a process can go to. Nobody knows the kind of one that has no memory yet."""
    mine = _on(node, process)
    kinds = {gpu.name for gpu in mine or node.gpus}
    crowded = mine if len(mine) == 1 else []  # on several, they can change places
    return [gpu for gpu in node.gpus if gpu.name in kinds and gpu not in crowded]


def _places(node: Node, gpus: Iterable[Gpu]) -> list[tuple[str, str]]:
    """Each with its room, which decides about their order."""
    free = {gpu: gpu.memory_total - node.memory_used(gpu) for gpu in gpus}
    order = sorted(free, key=lambda gpu: (-free[gpu], gpu.ordinal))
    return [
        (f"GPU {g.ordinal}: {plain(g.name)}, {human_bytes(free[g])} free", g.uuid) for g in order
    ]
