"""Real programs, real CRIU. These tests need root, as phosd does."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phosd.engine.criu.run.program import Criu
from phosd.engine.hook_client.places import hooks_folder
from phosd.engine.program.namespace_maker import end
from phosd.engine.system import pid_namespaces
from tests.node.criu.life import USER, Life


@pytest.fixture(scope="session")
def criu() -> Criu:
    """The CRIU that the checkout uses."""
    return Criu.find()


@pytest.fixture
def disk() -> Path:
    """A folder on a disk; /tmp may be memory."""
    return Path("/var/tmp")


@pytest.fixture
def lives(criu: Criu, tmp_path: Path, disk: Path) -> Iterator[Callable[[int], Life]]:
    """Makes a :class:`Life` for a user id; everything of it is gone afterwards."""
    made: list[Life] = []

    def make(uid: int = 0) -> Life:
        home = Path(tempfile.mkdtemp(prefix="phos-test-", dir=disk))
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


@pytest.fixture
def beside(lives: Callable[[int], Life], tmp_path: Path) -> Iterator[Life]:
    """A user's program, of which more than one may be restored, in pid namespaces."""
    made = lives(USER)
    made.criu = replace(made.criu, runtime_dir=tmp_path)
    hooks_folder(tmp_path).mkdir()
    yield made
    for left in pid_namespaces.living(tmp_path):
        end(left)
    Path("/dev/shm", made.home.name).unlink(missing_ok=True)
