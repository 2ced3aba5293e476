"""Undo steps in reverse order without losing the error that is the reason."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Undo:
    """Steps to run at the end of the context, last first. All of them run.

    An error that ends the context is the one that the caller sees; errors of undo steps become
    notes of it. Without such an error, the first error of a step is raised.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call ``step(*args, **kwargs)`` at the end.

        Add it before the action that it undoes, if that action can take effect and still fail.
        """
        self._steps.append(lambda: step(*args, **kwargs))

    def enter(self, context: AbstractContextManager[_T]) -> _T:
        """Enter a context; it is left in order with the undo steps."""
        entered = context.__enter__()
        self.add(context.__exit__, None, None, None)
        return entered

    def forget(self) -> None:
        """Drop all steps: the operation succeeded."""
        self._steps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        first = error
        while self._steps:
            try:
                self._steps.pop()()
            except Exception as failed:
                if first is None:
                    first = failed
                elif (note := f"besides, {failed}") not in getattr(first, "__notes__", ()):
                    first.add_note(note)
        if first is not error and first is not None:
            raise first


class Undoing:
    """A context whose end runs the undo steps that its methods added to ``_undo``."""

    _undo: Undo

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.__exit__(kind, error, traceback)
