"""The unit that starts a program again: by its cgroups, its parents and what systemd says."""

import os
import subprocess
from collections.abc import Mapping

import pytest

from phosd.engine.system import cgroups, restarters
from phosd.engine.system.restarters import Restarters, Service, Unit, unit_of

ANNS = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/bert.service", "unit bert.service"),
        ("/batch.slice/bert@3.service/worker", "unit bert@3.service"),
        ("/system.slice/a.service/b.service", "unit a.service"),
        (f"{ANNS}/app.slice/bert.service", "user unit bert.service"),
        (f"{ANNS}/app.slice/tmux-spawn-1.scope", "None"),
        ("/user.slice/user-1000.slice/session-3.scope", "None"),
        ("/system.slice/docker-12.scope", "None"),
        ("/", "None"),
    ],
)
def test_which_unit(path: str, unit: str) -> None:
    assert str(unit_of({cgroups.UNIFIED: path})) == unit
    assert str(unit_of({"name=systemd": path, "memory": "/system.slice/other.service"})) == unit


class Manager:
    """Says the same of each unit, and counts how often it is asked."""

    def __init__(self, service: Service | None) -> None:
        self.service, self.asked = service, 0

    def __call__(self, unit: Unit) -> Service | None:
        self.asked += 1
        if self.service is None:
            raise subprocess.TimeoutExpired("systemctl", 2.0)
        return self.service


@pytest.fixture
def in_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(_: int) -> Mapping[str, str]:
        return {cgroups.UNIFIED: "/system.slice/bert.service"}

    monkeypatch.setattr(cgroups, "memberships", places)


@pytest.mark.usefixtures("in_a_service")
def test_a_service_that_is_started_again_after_a_crash() -> None:
    me = os.getpid()
    assert Restarters(Manager(Service(me, restarts=True))).unit_of(me, named=False)
    assert not Restarters(Manager(Service(me, restarts=False))).unit_of(me, named=False)


@pytest.mark.usefixtures("in_a_service")
def test_what_a_service_waits_for_is_of_the_service_and_what_it_lets_go_is_not() -> None:
    of_mine = Restarters(Manager(Service(os.getpid(), restarts=True)))
    for session in (False, True):
        with subprocess.Popen(["sleep", "100"], start_new_session=session) as child:
            found = of_mine.unit_of(child.pid, named=False)
            assert found == ("" if session else "unit bert.service")
            assert of_mine.unit_of(child.pid, named=True)
            child.kill()


def test_what_a_service_waits_for_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a restored program, which is in a scope: its follower is in the service."""
    me, restored = os.getpid(), os.getppid()

    def places(pid: int) -> Mapping[str, str]:
        service, scope = "/system.slice/bert.service", "/user.slice/user-0.slice/restored-1.scope"
        return {cgroups.UNIFIED: service if pid == me else scope}

    monkeypatch.setattr(cgroups, "memberships", places)
    for main, found in ((me, "unit bert.service"), (0, "")):
        known = Restarters(Manager(Service(main, restarts=True)))
        assert known.unit_of(restored, named=True) == ""
        assert known.unit_of(restored, named=True, follower=me) == found


@pytest.mark.usefixtures("in_a_service")
@pytest.mark.parametrize("silent", [False, True])
def test_a_manager_is_believed_for_a_while_and_so_is_its_silence(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    me = os.getpid()
    manager = Manager(None if silent else Service(me, restarts=True))
    known = Restarters(manager)
    found = {known.unit_of(me, named=False) for _ in range(5)}
    assert (manager.asked, found) == (1, {"" if silent else "unit bert.service"})
    monkeypatch.setattr(restarters, "_BELIEVED_SECONDS", 0.0)
    known.unit_of(me, named=False)
    assert manager.asked == 2


def test_where_no_manager_is() -> None:
    """As in a container: nobody restarts it, and nothing fails."""
    assert Restarters().unit_of(os.getpid(), named=True) == ""
