"""Give a ``Trainer`` of Lightning safe points (docs/operate/programs.md).

trainer = Trainer(..., callbacks=[SafePoints(every=1000)])
"""

from typing import Any

from phosd import program
from phosd.adapters.steps import Steps

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under the name that it had before
    from pytorch_lightning import Callback


class SafePoints(Callback):  # type: ignore[misc]
    """A safe point after each batch of a training, a validation, a test or a prediction.
    Options are those of
    :class:`~phosd.adapters.steps.Steps`; the steps are those of the optimizer.
    """

    def __init__(self, every: int = 0, *, strict: bool = False) -> None:
        super().__init__()
        self._steps = Steps(every, strict=strict)
        self._step = 0

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Be saved here, between two batches. Several of them may be one step."""
        if trainer.global_step == self._step:
            program.safe_point()
            return
        self._step = trainer.global_step
        self._steps.come_to(self._step)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Be saved here, if somebody waits for that."""
        program.safe_point()

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        """Be saved here, if somebody waits for that."""
        program.safe_point()

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        """Be saved here, if somebody waits for that."""
        program.safe_point()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Say that no safe point comes any more."""
        program.end_safe_points()

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Say that no safe point comes any more."""
        program.end_safe_points()
