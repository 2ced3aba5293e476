"""Describe what earlier checkpoints of a program showed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelMark:
    """A kernel, by its name and the hash of its module (0 if unknown)."""

    name: str
    module: int


@dataclass(frozen=True)
class CheckpointHistory:
    """What past jobs showed about a program.

    ``suspects`` are kernels that may have written memory that was not predicted: they are predicted
    to write all memory. ``past`` has the last checkpoints of the process, the latest first.
    """

    @dataclass(frozen=True)
    class Entry:
        """The outcome of a past checkpoint of the same process, whether it succeeded or failed.

        ``mode`` is the mode that it ended in. Mode ``concurrent`` was begun and given up if it
        ``guessed_wrong`` (a kernel wrote chunks that were not predicted) or if it ``starved`` the
        program of the device memory that it held. ``lost`` is how many seconds the program was
        stopped or waited.
        """

        mode: str
        guessed_wrong: bool
        starved: bool
        lost: float

    suspects: tuple[KernelMark, ...] = ()
    past: tuple[Entry, ...] = ()


NONE = CheckpointHistory()
"""The history of a program that was never saved."""
