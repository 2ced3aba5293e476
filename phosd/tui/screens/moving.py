"""List the GPUs that processes can migrate to, or the reason why there is none."""

from collections.abc import Iterable, Mapping, Sequence

from phosd.client.records import Gpu, Process
from phosd.tui.node import Node
from phosd.tui.text import human_bytes, plain
from phosd.tui.widgets.dialogs import Choice

SUSPENDED = "suspended"
"""State of a process that is off its GPUs."""
_ONLY = "to"
"""Name of the only question; with several, each is named after the GPU it is about."""


def why_not_suspend(chosen: Sequence[Process]) -> str:
    """Return why the processes can be neither suspended nor resumed; empty if they can."""
    return next((why for process in chosen if (why := _not_hooked(process))), "")


def why_not_migrate(node: Node, chosen: Sequence[Process]) -> str:
    """Return why the processes cannot migrate; empty if they can."""
    for process in chosen:
        if why := _not_hooked(process):
            return f"{why}; `phos migrate --mode driver` moves it all the same"
        if process.state == SUSPENDED:
            return f"{process.pid} is suspended; `s` resumes it"
        if len(process.gpus) > 1 and len(chosen) > 1:
            return f"{process.pid} is on several GPUs; migrate it by itself"
        if not _others(node, process):
            return f"there is no other GPU of the kind that {process.pid} is on"
    return ""


def why_not_swap(chosen: Sequence[Process]) -> str:
    """Return why the processes cannot take turns; empty if they can."""
    away = [process for process in chosen if process.state == SUSPENDED]
    if len(chosen) != 2 or len(away) != 1:
        return "mark two processes with space: one that runs, and a suspended one"
    return why_not_suspend(chosen)


def choices(node: Node, chosen: Sequence[Process]) -> list[Choice]:
    """Return the questions: one for each GPU of a process on several, else a single one. The GPU
    with most free memory comes first.
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
    """Return the answers as phosd's ``destination``."""
    return given.get(_ONLY) or ",".join(f"{old}:{new}" for old, new in given.items() if new)


def _not_hooked(process: Process) -> str:
    return "" if process.hook == "hooked" else f"{process.pid} was not started with `phos run`"


def _on(node: Node, process: Process) -> list[Gpu]:
    return [gpu for gpu in node.gpus if gpu.path in process.gpus]


def _others(node: Node, process: Process) -> list[Gpu]:
    """Return the GPUs that a process can move to: those of its kind. While it has no memory, its
    kind is unknown, and all qualify.
    """
    mine = _on(node, process)
    kinds = {gpu.name for gpu in mine or node.gpus}
    crowded = mine if len(mine) == 1 else []  # processes on several GPUs can exchange them
    return [gpu for gpu in node.gpus if gpu.name in kinds and gpu not in crowded]


def _places(node: Node, gpus: Iterable[Gpu]) -> list[tuple[str, str]]:
    """Return a value for each GPU, labelled with its free memory, most free memory first."""
    free = {gpu: gpu.memory_total - node.memory_used(gpu) for gpu in gpus}
    order = sorted(free, key=lambda gpu: (-free[gpu], gpu.ordinal))
    return [
        (f"GPU {g.ordinal}: {plain(g.name)}, {human_bytes(free[g])} free", g.uuid) for g in order
    ]
