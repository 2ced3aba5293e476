"""Define and check the options of a checkpoint."""

from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec

from phosd.engine.criu.dump.preflight import TCP_POLICIES
from phosd.engine.hook_client.gate import DEADLINE, LONGEST_DEADLINE, Deadline
from phosd.engine.job.checkpoint_history import NONE, CheckpointHistory
from phosd.engine.operations.admission import UNLIMITED, DiskLimits
from phosd.engine.operations.permissions import ROOT
from phosd.engine.operations.safe_points import SafePointChoices
from phosd.errors import InvalidOption
from phosd.interface import options as stated

MODES: tuple[str, ...] = get_args(stated.CheckpointMode)
if TYPE_CHECKING:  # callers may have read the word somewhere, and msgspec checks it
    Mode = str
    Fallback = str
    Tcp = str
    Then = str
else:
    Mode, Fallback, Then = stated.CheckpointMode, stated.Fallback, stated.Then
    Tcp = Literal[TCP_POLICIES]


class CheckpointChoices(SafePointChoices, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a checkpoint that users may set.

    ``mode``: ``concurrent`` copies while the program runs, and proves that the saved bytes are
    those of the stop; ``recopy`` copies before the stop, in passes; ``stop`` copies inside the
    stop; ``driver`` needs no hook; ``auto`` chooses. ``tcp``: ``refuse`` to dump a process with
    TCP connections to the outside, or ``close`` them in the restored process. ``deadline``: the
    seconds within which the program must reach the gate and its work must end. ``then``: after the
    stop the program is to ``run``; or it stands still until its image is complete, and then comes
    to its ``end``, or is on ``hold`` until :meth:`~phosd.engine.job.progress.Progress.go_on`.
    """

    mode: Mode = "auto"
    fallback: Fallback = "auto"
    """After a wrong guess: go on in a mode that guesses less (``auto``), or fail (``none``)."""
    parent: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """An image of the same owner whose chunks are not saved again; empty: none."""
    tcp: Tcp = "refuse"
    deadline: Deadline = DEADLINE
    release_cached: bool = False
    """Whether PyTorch is first asked to free the device memory in its cache."""
    durable: bool = False
    """Whether an image that is in memory is written to the disk before the checkpoint ends."""
    then: Then = "run"
    in_memory: bool = False
    """Whether the program may end although a reboot would lose its image, which is in memory."""

    @property
    def stands(self) -> bool:
        """Whether the program stands still until its image is complete."""
        return self.then != "run"


class CheckpointOptions(CheckpointChoices, frozen=True, kw_only=True):
    """Options of a checkpoint: the user's, and those that phosd adds."""

    caller: int = ROOT
    """The user id that requested it. Only root may save processes of other users."""
    experience: CheckpointHistory = NONE
    limits: DiskLimits = UNLIMITED
    name: str = ""
    """The name of the image; empty: that of the program, if it has one."""
    wish: int = 0
    """The number of the checkpoint that the process asks for itself; 0: somebody else asks."""
    audit: bool = False
    """Whether mode ``concurrent`` also counts the chunks that it saved early without need."""

    def require_possible(self) -> None:
        """Raise :class:`InvalidOption` for options that no job can satisfy."""
        if self.mode not in MODES:
            raise InvalidOption(
                f"there is no checkpoint mode {self.mode!r}", hint=f"use one of {', '.join(MODES)}"
            )
        if self.stands and self.mode in ("concurrent", "recopy"):
            raise InvalidOption(
                f"mode {self.mode} saves a program that runs on, and this one does not",
                hint="leave the mode out, or use stop or driver",
            )
        if self.in_memory and (self.then != "end" or self.durable):
            raise InvalidOption(
                "in_memory is for a program that ends before its image is on the disk",
                hint="give then=end with it, and not durable; or leave it out",
            )
        if self.release_cached and self.mode == "driver":
            raise InvalidOption(
                "mode driver releases no cached memory: it works without the hook",
                hint="use another mode, or leave release_cached out",
            )
        if not 0 < self.deadline <= LONGEST_DEADLINE:  # false for "not a number", too
            raise InvalidOption(
                f"a deadline of {self.deadline} s is not possible", hint="give a number of seconds"
            )
