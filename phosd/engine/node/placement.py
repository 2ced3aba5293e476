"""Parse destinations of processes, and check whether a GPU can take them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from phosd.engine.node.gpus import GpuInfo, divided
from phosd.errors import GpuMismatch, InvalidOption, Reason, Unsupported

_HOW = "name a GPU by its number or the beginning of its UUID, several as OLD:NEW,OLD:NEW"


class Named(Protocol):
    """A GPU, as far as users name it."""

    @property
    def ordinal(self) -> int: ...
    @property
    def uuid(self) -> str: ...


def parse_moves(
    text: str, used: Collection[int], gpus: Sequence[GpuInfo], *, may_stay: bool = False
) -> dict[int, int]:
    """Return the GPUs that processes leave, each with the GPU that it is replaced by, by ordinal.

    ``text`` and ``used`` are as for :func:`parse_pairs`. GPUs that stay are left out. Raises
    :class:`InvalidOption`, also if all GPUs stay, unless ``may_stay``.
    """
    pairs = parse_pairs(text, used, gpus)
    moves = {old: new for old, new in pairs.items() if old != new}
    if not moves and not may_stay:
        raise InvalidOption(f"the program is on GPU {text} already", hint="name another GPU")
    _require_distinct(moves.get(gpu, gpu) for gpu in used)
    return moves


def parse_pairs(
    text: str,
    used: Collection[int],
    gpus: Sequence[GpuInfo],
    *,
    olds: Sequence[Named] | None = None,
    whose: str = "the program",
) -> dict[int, int]:
    """Return the GPUs that a text names, each with the GPU that replaces it, by ordinal.

    ``text`` is one GPU, for a program that uses one, or ``OLD:NEW`` for each (``OLD=NEW`` is
    understood, too). ``used`` are the GPUs of the program, ``olds`` those among which OLD is (those
    of this node by default). Raises :class:`InvalidOption`.
    """
    pairs: dict[int, int] = {}
    for part in text.replace("=", ":").split(","):
        old, colon, new = part.rpartition(":")
        if not colon and len(used) != 1:
            raise InvalidOption(
                f"{whose} uses {_several(used)}: {text!r} does not say where each goes",
                hint="give a destination for each GPU, such as 0:1,1:0",
            )
        if colon:
            source = find(old, gpus) if olds is None else find(old, olds, whose)
        else:
            source = next(iter(used))
        if source in pairs:
            raise InvalidOption(f"{text!r} names GPU {source} twice", hint=_HOW)
        pairs[source] = find(new, gpus)
    if unused := pairs.keys() - set(used):
        raise InvalidOption(
            f"{whose} does not use GPU {min(unused)}, but {_several(used)}", hint=_HOW
        )
    _require_distinct(pairs.values())
    return pairs


def _require_distinct(targets: Iterable[int]) -> None:
    found = list(targets)
    if doubled := [gpu for gpu in found if found.count(gpu) > 1]:
        raise InvalidOption(
            f"two of the program's GPUs would be GPU {doubled[0]}, which the driver cannot do",
            hint="give each a GPU of its own, such as 0:1,1:0",
        )


def find(name: str, gpus: Sequence[Named], where: str = "this node") -> int:
    """Return the ordinal of the GPU with this number, or with a UUID that begins with ``name``."""
    name = name.strip()
    if name.isascii() and name.isdecimal():
        found = [gpu.ordinal for gpu in gpus if gpu.ordinal == int(name)]
    else:
        found = [gpu.ordinal for gpu in gpus if name and gpu.uuid.startswith(name)]
    if len(found) != 1:
        known = ", ".join(f"{gpu.ordinal} ({gpu.uuid})" for gpu in gpus) or "none"
        raise InvalidOption(
            f"{name!r} names {'several GPUs' if found else 'no GPU'} of {where}",
            hint=f"{_HOW}; these are {known}",
        )
    return found[0]


def whole(moves: Mapping[int, int], count: int) -> list[int]:
    """Return the GPU that replaces each GPU of the node, as the driver's restore expects it.

    GPUs that ``moves`` does not name stay, or take the places that are left.
    """
    left = [gpu for gpu in range(count) if gpu not in moves.values()]
    to = dict(moves)
    to |= {gpu: gpu for gpu in range(count) if gpu not in to and gpu in left}
    free = iter(gpu for gpu in left if gpu not in to.values())
    return [to[gpu] if gpu in to else next(free) for gpu in range(count)]


def require_fit(moves: Mapping[int, int], gpus: Sequence[GpuInfo]) -> None:
    """Raise unless each new GPU is of the old one's kind and the driver can move programs to it."""
    known = {gpu.ordinal: gpu for gpu in gpus}
    for old, new in moves.items():
        if known[old].name != known[new].name:
            raise GpuMismatch(
                f"GPU {old} is a {known[old].name}, GPU {new} a {known[new].name}",
                hint="the driver moves programs between GPUs of one kind only",
            )
        require_undivided(new)


def require_undivided(ordinal: int) -> None:
    """Raise :class:`Unsupported` if the driver cannot move programs to a GPU."""
    if why := divided(ordinal):
        raise Unsupported(
            f"GPU {ordinal} {why}, and the driver does not move programs to such a GPU",
            hint="choose another GPU",
            reason=Reason.DIVIDED_GPU,
        )


def _several(used: Iterable[int]) -> str:
    return f"the GPUs {', '.join(map(str, sorted(used)))}" if used else "no GPU"
