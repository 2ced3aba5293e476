"""What people call a program, in lists of images and jobs."""

from collections.abc import Iterable
from typing import NamedTuple


class Called(NamedTuple):
    """What people call a program: its name, and the pod, Slurm job or container that it is in, in
    words. Each is empty where there is none.
    """

    name: str = ""
    within: str = ""

    @classmethod
    def together(cls, programs: Iterable["Called"]) -> "Called":
        """Return what several programs are called, with commas between."""
        each = [*programs]
        return cls(
            ", ".join(filter(None, (name for name, _ in each))),
            ", ".join(dict.fromkeys(filter(None, (within for _, within in each)))),
        )
