"""How to checkpoint."""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from phosd.engine.criu.preflight import TCP_POLICIES
from phosd.engine.hook_client.gate import DEADLINE, LONGEST_DEADLINE, Deadline
from phosd.engine.job.experience import NONE, Experience
from phosd.engine.operations.admission import UNLIMITED, DiskLimits
from phosd.engine.operations.permissions import ROOT
from phosd.errors import InvalidOption

MODES = ("auto", "concurrent", "recopy", "stop", "driver")
FALLBACKS = ("auto", "none")
if TYPE_CHECKING:  # whoever calls the engine itself learns from it what there is
    Mode = str
    Fallback = str
    Tcp = str
else:
    Mode = Literal[MODES]
    Fallback = Literal[FALLBACKS]
    Tcp = Literal[TCP_POLICIES]


class CheckpointChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What users may say of a checkpoint. ``deadline`` is how many seconds the program may take to
    come to rest.

    ``mode``: ``concurrent`` copies while the program runs and proves that what is saved is the
    state of the stop; ``recopy`` copies before the stop, again and again; ``stop`` copies inside
    the stop; ``driver`` needs no hook; ``auto`` chooses. ``tcp`` says what becomes of connected TCP
    sockets: ``refuse`` to dump a process that has one, or ``close`` them in the restored process.
    """

    mode: Mode = "auto"
    fallback: Fallback = "auto"
    """A wrong guess makes the same job go on in a mode that guesses less, or fail (``none``)."""
    parent: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """An image of the same owner whose chunks need not be saved again; empty: none."""
    tcp: Tcp = "refuse"
    deadline: Deadline = DEADLINE
    release_cached: bool = False
    """Whether PyTorch is asked first to give back the device memory that it keeps cached."""


class CheckpointOptions(CheckpointChoices, frozen=True, kw_only=True):
    """How to checkpoint: what the user has said, and what phosd adds."""

    caller: int = ROOT
    """The user id that it is done for. Only root may save what is not wholly its own."""
    experience: Experience = NONE
    limits: DiskLimits = UNLIMITED
    audit: bool = False
    """Whether mode ``concurrent`` also counts the chunks that it saved early without need."""

    def require_possible(self) -> None:
        """Raise :class:`InvalidOption` for what no job can do."""
        if self.mode not in MODES:
            raise InvalidOption(
                f"there is no checkpoint mode {self.mode!r}", hint=f"use one of {', '.join(MODES)}"
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
