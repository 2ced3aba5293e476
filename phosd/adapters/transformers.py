"""Give a ``transformers.Trainer`` safe points (docs/operate/programs.md).

trainer = Trainer(..., callbacks=[SafePoints(every=1000)])
"""

from typing import Any

from transformers import TrainerCallback

from phosd import program
from phosd.adapters.steps import Steps


class SafePoints(TrainerCallback):  # type: ignore[misc]
    """A safe point after each step of the optimizer, and of an evaluation. Options are those of
    :class:`~phosd.adapters.steps.Steps`.
    """

    def __init__(self, every: int = 0, *, strict: bool = False) -> None:
        self._steps = Steps(every, strict=strict)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Be saved here, between two steps."""
        self._steps.come_to(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Be saved here, if somebody waits for that."""
        program.safe_point()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say that no safe point comes any more."""
        program.end_safe_points()
