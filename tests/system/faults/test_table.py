"""The tests of this folder, all commits together, play every fault at every point."""

from collections import Counter

from phosd.engine.faults import Kind, Point
from tests.system.faults.case import (
    CHECKPOINT,
    COMPACT,
    DELETE,
    ENDING,
    FAILING,
    FILES,
    GROUP_STOP,
    HOOK,
    LARGE_MEMORY,
    MIGRATE,
    REHEARSE,
    RESTORE,
    RESUME,
    RUNTIME,
    SAFE_POINT,
    STANDING,
    SUSPEND,
    TRANSFER,
    UNSEEN_GPU,
    WRITE_BACK,
)


def test_every_point_is_met_by_one_kind_of_job() -> None:
    moving = (*MIGRATE, *SUSPEND, *RESUME, *GROUP_STOP, *STANDING, *RUNTIME)
    special = (*SAFE_POINT, *LARGE_MEMORY, *UNSEEN_GPU)
    images = (*DELETE, *COMPACT, *WRITE_BACK, *TRANSFER, *REHEARSE, *FILES)
    met = Counter([*CHECKPOINT, *RESTORE, *moving, *special, *images, *HOOK])
    assert met == Counter(Point)


def test_every_kind_lets_a_step_fail_or_ends_a_process() -> None:
    assert Counter([*FAILING, *ENDING]) == Counter(Kind)
