"""The movers of a node: who is kept, and who is started again."""

from pathlib import Path
from typing import Any

import pytest

from phosd.engine.digest import DigestKey
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.movers import Movers
from phosd.errors import Internal


class Fake:
    """A mover that lives until it is told otherwise, and counts how often it is closed."""

    def __init__(self) -> None:
        self.alive = True
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def keep_room(self) -> None:
        pass


def test_a_dead_one_is_closed_once_though_the_next_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptors may be others' by then."""
    first: Any = Fake()
    second: Any = Fake()
    starts: list[Any] = [first, Internal("it was killed", hint="try again"), second]

    def start(*_: object) -> Any:
        found = starts.pop(0)
        if isinstance(found, Internal):
            raise found
        return found

    monkeypatch.setattr(Mover, "start", start)
    claims: Any = None
    table = Movers(tmp_path, None, DigestKey(b"a secret of the test, long enough"), claims, set)
    assert [table.mover(0)] == [first]
    first.alive = False
    with pytest.raises(Internal, match="it was killed"):
        table.mover(0)
    assert [table.mover(0)] == [second]
    table.close()
    assert (first.closed, second.closed) == (1, 1)
