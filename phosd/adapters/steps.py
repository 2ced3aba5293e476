"""Come to a safe point at each step of a training loop, or save the program there."""

import warnings

from phosd import program


class Steps:
    """Asks for a checkpoint at every ``every``-th step; 0: only others ask.

    A checkpoint that fails is a warning, and if ``strict`` an error that ends the training.
    """

    def __init__(self, every: int = 0, *, strict: bool = False) -> None:
        if every < 0:
            raise ValueError(f"every={every} is not possible; give a number of steps, or 0")
        self._every = every
        self._strict = strict

    def come_to(self, step: int) -> None:
        """Be saved here, if it is time or somebody else waits for that; steps count from 1."""
        if not self._every or step % self._every:
            program.safe_point()
            return
        try:
            program.checkpoint()
        except program.CheckpointFailed as error:
            if self._strict:
                raise
            warnings.warn(f"not saved at step {step}: {error}", RuntimeWarning, stacklevel=2)
