"""A restored program has the audit identity that it had, and none that CRIU's files claim."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from phosd.engine.system import audit
from phosd.engine.system.privileges import NO_LOGINUID
from tests.node.criu.life import COUNTER, USER, Life
from tests.support.criu_images import Field, ImageFile

pytestmark = pytest.mark.skipif(
    audit.loginuid(os.getpid()) is None, reason="the kernel has no audit"
)
MINE, ANOTHER = 4242, 4343
LOGS_IN = f"""
with open("/proc/self/loginuid", "w") as file:
    file.write("{MINE}")
"""
TASK_CORE, LOGINUID = 3, 13
"""Fields of CRIU's ``core_entry`` and ``task_core_entry``."""


def claim(life: Life, loginuid: int) -> None:
    """Make CRIU's file of the program say that it is another user's."""
    path = life.images / f"core-{life.pid}.img"
    file = ImageFile.read(path)
    (core,) = file.messages
    (task,) = (each.value for each in core if each.number == TASK_CORE)
    assert isinstance(task, list)
    assert not any(each.number == LOGINUID for each in task), "a user's CRIU notes it by now"
    task.append(Field(LOGINUID, 0, loginuid))
    file.write(path)
    assert life.dumped is not None
    life.record = life.dumped.record("images")


def noted(life: Life, loginuid: int | None) -> None:
    """Tell phosd this of the program."""
    assert life.record is not None and life.record.details is not None
    assert life.record.details.loginuid == MINE
    details = msgspec.structs.replace(life.record.details, loginuid=loginuid)
    life.record = msgspec.structs.replace(life.record, details=details)


@pytest.mark.parametrize("pid_namespace", [False, True])
@pytest.mark.parametrize(("known", "has"), [(MINE, MINE), (None, USER)])
def test_what_criu_s_files_say_does_not_count(
    lives: Callable[[int], Life],
    tmp_path: Path,
    known: int | None,
    has: int,
    pid_namespace: bool,
) -> None:
    """Those of an import are written by anybody, and of it nothing else is known."""
    life = lives(USER)
    (tmp_path / "run/hook").mkdir(parents=True)
    life.criu = dataclasses.replace(life.criu, runtime_dir=tmp_path / "run")
    life.start(LOGS_IN + COUNTER)
    life.counts_on()
    life.dump()
    claim(life, ANOTHER)
    noted(life, known)
    life.kill()
    restored = life.restore(pid_namespace=pid_namespace)
    life.counts_on()
    assert audit.loginuid(restored.pid) == has


@pytest.mark.parametrize(
    ("uid", "before", "has"), [(0, LOGS_IN, MINE), (0, "", NO_LOGINUID), (USER, "", NO_LOGINUID)]
)
def test_it_has_what_it_had(lives: Callable[[int], Life], uid: int, before: str, has: int) -> None:
    life = lives(uid)
    life.start(before + COUNTER)
    life.counts_on()
    restored = life.again()
    life.counts_on()
    assert audit.loginuid(restored.pid) == has
