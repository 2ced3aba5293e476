"""A program listens on a socket in a folder that is gone when it is restored."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phosd.errors import PhosError
from tests.node.criu.life import COUNTER, USER, Life, in_order

LISTENING = (
    """
import os, socket, sys
os.makedirs(sys.argv[1], mode=0o700)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1] + "/listener")
listener.listen()
abstract = socket.socket(socket.AF_UNIX)
abstract.bind(b"\\0phos-test-" + str(os.getpid()).encode())
"""
    + COUNTER
)


def listening(life: Life) -> Path:
    os.chown(life.home, life.uid, life.uid)
    folder = life.home / "above" / "folder"
    life.start(LISTENING, str(folder))
    life.counts_on()
    return folder


@pytest.mark.parametrize("uid", [0, USER])
def test_it_is_made_again(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    folder = listening(life)
    life.dump()
    life.kill()
    shutil.rmtree(folder.parent)
    life.restore()
    assert in_order(life.counts_on())
    assert (folder / "listener").is_socket()
    assert {
        (each.stat().st_uid, each.stat().st_mode & 0o777) for each in (folder, folder.parent)
    } == {(uid, 0o700)}


def test_it_is_removed_when_the_restore_fails(life: Life) -> None:
    folder = listening(life)
    life.dump()
    life.kill()
    shutil.rmtree(folder.parent)
    (life.images / "pages-1.img").write_bytes(b"")
    with pytest.raises(PhosError):
        life.restore()
    assert not folder.parent.exists()


def test_where_its_owner_may_not_make_it_is_said(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    folder = listening(life)
    life.dump()
    life.kill()
    shutil.rmtree(folder.parent)
    os.chown(life.home, 0, 0)
    with pytest.raises(PhosError, match=f"{folder}, in which .* had a socket, .* cannot be made"):
        life.restore()
