"""Say where the device memory of a suspended program is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Away:
    """Where the device memory of a suspended program is: in ``memory`` or on ``disk``, where it has
    ``stored_bytes``, ``since`` then (seconds since the epoch). All processes of the program have
    the same ``name`` for it. ``hollow``: its contexts are on its GPUs still; ``ready``: and what
    it has in device memory is there already, too.
    """

    name: str
    where: str
    stored_bytes: int
    since: float
    hollow: bool = False
    ready: bool = False
