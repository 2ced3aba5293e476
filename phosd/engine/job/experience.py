"""What earlier checkpoints of a program have taught."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelMark:
    """A kernel, by its name and the hash of the module it is from (0 when that is not known)."""

    name: str
    module: int


@dataclass(frozen=True)
class PastCheckpoint:
    """How a past checkpoint of the same process went, whether it was done or failed.

    ``mode`` is the one that it ended in. Mode ``concurrent`` was begun and given up if it
    ``guessed_wrong`` (the program wrote where nobody expected) or ``starved`` the program of the
    device memory that it held. ``lost`` are the seconds in which the program stood still or waited.
    """

    mode: str
    guessed_wrong: bool
    starved: bool
    lost: float


@dataclass(frozen=True)
class Experience:
    """What past jobs tell of a program.

    ``suspects`` are kernels that have written where nobody expected: they are taken to write
    everything. ``past`` are the last checkpoints of the process, the latest first.
    """

    suspects: tuple[KernelMark, ...] = ()
    past: tuple[PastCheckpoint, ...] = ()


NONE = Experience()
"""Of a program that was never saved."""
