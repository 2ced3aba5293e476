"""Rights: who may save and restore what."""

import dataclasses
import grp
import os
import pwd
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.image.manifest import Manifest
from phosd.engine.operations.permissions import require_may_restore, require_may_save
from phosd.engine.program.tree import ProcessTree, scan
from phosd.errors import NotAuthorized
from tests.support.fake_engine import manifest
from tests.support.harness import wait_until

USER = 54321
DAEMON = pwd.getpwnam("daemon")
"""A user with an entry in the user database, in no group but their own."""


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    """A process of a user, and its child."""
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    with subprocess.Popen(
        ["/usr/bin/python3", "-S", "-c", code], user=USER, group=USER, extra_groups=[]
    ) as started:
        try:
            wait_until(lambda: len(scan(started.pid).processes) == 2, "the child")
            yield scan(started.pid)
        finally:
            for process in reversed(scan(started.pid).processes):
                subprocess.run(["kill", "-9", str(process.pid)], check=True)


def test_the_owner_and_root_may_save_a_tree(tree: ProcessTree) -> None:
    require_may_save(tree, USER)
    require_may_save(tree, 0)
    with pytest.raises(NotAuthorized, match=f"belongs to uid {USER}"):
        require_may_save(tree, USER + 1)


def test_a_tree_of_several_users_is_for_root(tree: ProcessTree) -> None:
    root, child = tree.processes
    mixed = dataclasses.replace(
        tree, processes=(root, dataclasses.replace(child, uids=(0, 0, 0, 0)))
    )
    require_may_save(mixed, 0)
    with pytest.raises(NotAuthorized, match="runs under other ids than its root"):
        require_may_save(mixed, USER)


def test_an_image_is_for_its_owner_if_all_of_it_is_theirs() -> None:
    mine = belonging()
    require_may_restore(mine, DAEMON.pw_uid)
    require_may_restore(mine, 0)
    with pytest.raises(NotAuthorized, match=f"holds processes of uid {DAEMON.pw_uid}"):
        require_may_restore(mine, USER)
    theirs = msgspec.structs.replace(mine.processes[0], uid=0, pid=2)
    with pytest.raises(NotAuthorized, match="holds processes of uid 0"):
        require_may_restore(
            msgspec.structs.replace(mine, processes=(*mine.processes, theirs)), DAEMON.pw_uid
        )


def belonging(**ids: object) -> Manifest:
    """An image of this user, whose process had these ids."""
    image = manifest("i", owner=DAEMON.pw_uid)
    (process,) = image.processes
    process = msgspec.structs.replace(process, **{"gid": DAEMON.pw_gid, **ids})
    return msgspec.structs.replace(image, processes=(process,))


def test_an_image_gives_no_group_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may have been taken out of it since."""
    tty = grp.getgrnam("tty").gr_gid
    details = CpuDetails(DAEMON.pw_uid, DAEMON.pw_gid, (tty,), "", "refuse", False, 0)
    trees = (msgspec.structs.replace(belonging().trees[0], details=details),)
    images = (
        belonging(groups=(DAEMON.pw_gid, tty)),
        belonging(gid=tty),
        msgspec.structs.replace(belonging(), trees=trees),
    )
    for image in images:
        require_may_restore(image, 0)
        with pytest.raises(NotAuthorized, match=rf"in group tty \({tty}\), which uid"):
            require_may_restore(image, DAEMON.pw_uid)
    with pytest.raises(NotAuthorized, match=f"in group {USER}, which"):  # it was removed
        require_may_restore(belonging(groups=(USER,)), DAEMON.pw_uid)
    monkeypatch.setattr(os, "getgrouplist", lambda name, group: [group, tty])
    for image in images:
        require_may_restore(image, DAEMON.pw_uid)


def test_a_user_whose_groups_nobody_knows() -> None:
    image = manifest("i", owner=USER)
    require_may_restore(image, 0)
    with pytest.raises(NotAuthorized, match=f"the groups of uid {USER} are not known"):
        require_may_restore(image, USER)


def test_an_image_with_privileges_is_for_root() -> None:
    details = CpuDetails(USER, USER, (), "pid 7 has capabilities", "refuse", False, 0)
    image = manifest("i", owner=USER)
    trees = (msgspec.structs.replace(image.trees[0], details=details),)
    image = msgspec.structs.replace(image, trees=trees)
    require_may_restore(image, 0)
    with pytest.raises(NotAuthorized, match="pid 7 has capabilities"):
        require_may_restore(image, USER)
