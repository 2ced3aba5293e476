"""A program that forks without a pause while it is saved."""

import os
import shutil
from collections.abc import Callable

from phosd.errors import Busy, Internal
from tests.node.criu.life import COUNTER, USER, Life, wait_for

FORKS = """
import os, threading

def fork():
    while True:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

for _ in range(3):
    threading.Thread(target=fork, daemon=True).start()
"""
TRIES = 8


def is_saved(life: Life) -> bool:
    """Dump the program. If that fails, it is said why, and the program goes on."""
    try:
        life.dump()
    except (Busy, Internal) as error:
        shutil.rmtree(life.images)
        assert error.hint
        return False
    finally:
        life.counts_on()
    return True


def is_gone(group: int) -> bool:
    """Whether the last child, which nobody knew, has ended, too: its group's number is free."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_is_saved_and_restored(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    life.start(FORKS + COUNTER)
    life.counts_on()
    assert any(is_saved(life) for _ in range(TRIES))
    life.kill()
    wait_for(lambda: is_gone(life.pid))
    life.restore()
    life.counts_on()
