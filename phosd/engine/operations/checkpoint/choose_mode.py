"""Choose the mode of a checkpoint."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.program.group import CheckpointGroup
from phosd.errors import Reason, Unsupported

_PARKABLE = "the hook can park the device memory and copy it afterwards"
_STANDS = "the program does not run on meanwhile"
_MAKES_MEMORY = (
    "the program is on a GPU that it did not see when it was started, for which the driver gives "
    "it back copies of its memory only"
)
_ENOUGH = 2
"""How many checkpoints with the same outcome are taken for a rule, not a coincidence."""
_CLEARLY = 0.8
"""A mode is better if it costs less than this share of the time that the other costs."""


@dataclass(frozen=True)
class Choice:
    """A mode and the reason for it; the reason is empty if the caller chose the mode."""

    mode: str
    why: str = ""


def choose(
    group: CheckpointGroup,
    wanted: str,
    past: Sequence[CheckpointHistory.Entry] = (),
    *,
    stands: bool = False,
) -> Choice:
    """Return the mode to begin with. ``stands``: the program does not run while it is saved.

    Raises :class:`Unsupported` if ``wanted`` is impossible.
    """
    why_not = group.why_not_parked()
    choice = Choice(wanted)
    if wanted == "auto":
        if why_not:
            choice = Choice("driver", str(why_not))
        else:
            choice = Choice("stop", _STANDS) if stands else _by_experience(past)
            if choice.mode == "concurrent" and group.makes_memory:
                choice = Choice("recopy", _MAKES_MEMORY)
    elif wanted != "driver" and why_not:
        raise Unsupported(
            f"mode {wanted} is not possible: {why_not}",
            hint="use mode driver",
            reason=why_not.reason,
        )
    elif wanted == "concurrent" and group.makes_memory:
        raise Unsupported(
            f"mode concurrent is not possible: {_MAKES_MEMORY}",
            hint="use mode recopy",
            reason=Reason.UNSEEN_GPU,
        )
    if choice.mode == "driver" and (why_not_driver := group.why_not_by_driver()):
        raise Unsupported(
            f"mode driver is not possible: {why_not_driver}",
            hint="use mode=stop",
            reason=Reason.SHARED_MEMORY,
        )
    return choice


def _by_experience(past: Sequence[CheckpointHistory.Entry]) -> Choice:
    """Return ``concurrent``, unless it failed repeatedly or cost more than another mode.

    Free device memory does not matter here: without it the program waits for its chunks, but no
    longer than another mode would stop it (docs/benchmarks/concurrent.md).
    """
    tried = [e for e in past if e.mode == "concurrent" or e.guessed_wrong or e.starved]
    last = tried[:_ENOUGH]
    if len(last) == _ENOUGH:
        if all(e.guessed_wrong for e in last):
            return Choice("recopy", f"the guess was wrong in the last {_ENOUGH} that made one")
        if all(e.starved for e in last):
            return Choice(
                "recopy",
                "the program needed the memory that mode concurrent held, the last "
                f"{_ENOUGH} times",
            )
    losses = defaultdict(list)
    for e in past:
        if not (e.guessed_wrong or e.starved):
            losses[e.mode].append(e.lost)
    means = {mode: fmean(lost) for mode, lost in losses.items() if len(lost) >= _ENOUGH}
    if "concurrent" in means:
        mode, least = min(means.items(), key=lambda item: item[1])
        if mode in ("recopy", "stop") and least < _CLEARLY * means["concurrent"]:
            return Choice(
                mode,
                f"earlier checkpoints cost the program {least:.2f} s each in this mode, and "
                f"{means['concurrent']:.2f} s in mode concurrent",
            )
    return Choice("concurrent", _PARKABLE)
