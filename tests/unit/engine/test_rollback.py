"""Undoing: every step, last first; the cause of the trouble is what is seen."""

import pytest

from phosd.engine.job.rollback import Undo
from phosd.errors import Internal, Unsupported


def fail(text: str) -> None:
    raise Internal(text, hint="then do that")


def test_every_step_is_undone_last_first() -> None:
    order: list[int] = []
    with Undo() as undo:
        for number in range(3):
            undo.add(order.append, number)
        assert not order
    assert order == [2, 1, 0]


def test_a_failing_step_hides_neither_the_error_nor_the_other_steps() -> None:
    order: list[int] = []
    with pytest.raises(Unsupported) as raised, Undo() as undo:
        undo.add(order.append, 1)
        undo.add(fail, "worse")
        undo.add(order.append, 2)
        undo.add(fail, "bad")
        raise Unsupported("the cause", hint="do this")
    assert order == [2, 1]
    said = "the cause; do this; besides, bad; then do that; besides, worse; then do that"
    assert str(raised.value) == said


def test_the_first_step_that_fails_is_the_error_when_nothing_else_failed() -> None:
    order: list[int] = []
    with pytest.raises(Internal, match=r"^first; then do that; besides, second"), Undo() as undo:
        undo.add(order.append, 1)
        undo.add(fail, "second")
        undo.add(fail, "first")
    assert order == [1]


def test_what_is_forgotten_is_not_undone() -> None:
    with Undo() as undo:
        undo.add(fail, "never")
        undo.forget()
