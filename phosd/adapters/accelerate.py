"""Give a model that is trained with ``accelerate`` safe points (docs/operate/programs.md).

add_hook_to_module(model, SafePoints(every=1000), append=True)
"""

from typing import Any

from accelerate.hooks import ModelHook

from phosd import program
from phosd.adapters.steps import Steps


class SafePoints(ModelHook):  # type: ignore[misc]
    """A safe point before each forward pass of a model that is being trained. Options are those of
    :class:`~phosd.adapters.steps.Steps`; passes count as steps.
    """

    def __init__(self, every: int = 0, *, strict: bool = False) -> None:
        self._steps = Steps(every, strict=strict)
        self._passes = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Be saved here, before the pass has put anything on the GPU."""
        if module.training:
            if self._passes:  # before the first one there is nothing to save
                self._steps.come_to(self._passes)
            self._passes += 1
        return args, kwargs

    def detach_hook(self, module: Any) -> Any:
        """Say that no safe point comes any more."""
        program.end_safe_points()
        return module
