"""Real programs, real CRIU. These tests need root, as phosd does."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.program import Criu
from tests.node.criu.life import Life


@pytest.fixture(scope="session")
def criu() -> Criu:
    """The CRIU that the checkout uses."""
    return Criu.find()


@pytest.fixture
def lives(criu: Criu, tmp_path: Path) -> Iterator[Callable[[int], Life]]:
    """Makes a :class:`Life` for a user id; everything of it is gone afterwards."""
    made: list[Life] = []

    def make(uid: int = 0) -> Life:
        home = Path(tempfile.mkdtemp(prefix="phos-test-"))
        home.chmod(0o755)
        os.chown(home, uid, uid)
        private = tmp_path / f"private{len(made)}"
        private.mkdir(mode=0o700)
        made.append(Life(criu, home, private, uid))
        return made[-1]

    yield make
    for life in made:
        life.end()
        shutil.rmtree(life.home)


@pytest.fixture
def life(lives: Callable[[int], Life]) -> Life:
    """A program of root."""
    return lives(0)
