"""Undoing what was done, when the reason may be an error that must not be lost."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Undo:
    """Steps that undo what was done, at the end of the context: last first, all of them.

    An error that ends the context stays what the caller sees; what fails while things are undone
    becomes a note of it. Without one, the first step that fails is the error.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Have ``step(*args, **kwargs)`` called at the end. Add it before what it undoes is done,
        if that can be done and still fail.
        """
        self._steps.append(lambda: step(*args, **kwargs))

    def enter(self, context: AbstractContextManager[_T]) -> _T:
        """Enter a context that ends where the other steps are undone."""
        entered = context.__enter__()
        self.add(context.__exit__, None, None, None)
        return entered

    def forget(self) -> None:
        """All is well: nothing shall be undone."""
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
                else:
                    first.add_note(f"besides, {failed}")
        if first is not error and first is not None:
            raise first


class Undoing:
    """A context whose end undoes what its methods have added to ``_undo``."""

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
