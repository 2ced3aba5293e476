"""A unit's program is restored into a scope of its own: what starts it again is still its unit."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phosd.cli.run_command.foreground import Foreground
from phosd.cli.settings import Settings
from phosd.client.records import Image, Manager
from phosd.engine.program.process import list_processes
from phosd.engine.system import cgroups
from phosd.engine.system.restarters import Restarters, Service
from tests.support.harness import wait_until
from tests.system.service.test_end_to_end import phosd
from tests.system.service.test_preemption import SAVED, Line, nothing_left

UNIT, SCOPE = "/system.slice/bert.service", "/user.slice/user-0.slice/restored-1.scope"


@contextmanager
def free(_: int) -> Iterator[bool]:
    yield True


def restarter(monkeypatch: pytest.MonkeyPatch, line: Line, folder: Path, relay: int) -> str:
    """Return what is told of the program, as if the relay alone were in its unit's cgroup."""

    def places(pid: int) -> Mapping[str, str]:
        return {cgroups.UNIFIED: UNIT if pid == relay else SCOPE}

    monkeypatch.setattr(cgroups, "memberships", places)
    known = Restarters(lambda _: Service(relay, restarts=True))
    found = list_processes(folder / "run", free, known)
    monkeypatch.undo()
    return next(each.restarter for each in found if each.pid == line.program())


@pytest.mark.parametrize("features", [frozenset({"followers"}), frozenset()])
def test_a_phosd_that_knows_no_followers_is_told_of_none(features: frozenset[str]) -> None:
    """As long as it was not started anew after an upgrade."""
    foreground = Foreground(
        *(Settings(), "bert", ["true"]),
        saves=False,
        grace=None,
        in_memory=False,
        pidns=None,
        step=None,
    )
    client: Any = SimpleNamespace(manager=lambda: Manager("/", features=features))
    told = foreground._restore_options(client, Image("/image"))
    assert told == ({"follower": os.getpid()} if features else {})


@pytest.mark.parametrize("options", [[], ["--no-pidns"]])
def test_a_restored_program_is_started_again_by_the_unit_of_its_relay(
    bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    line = Line(bus, tmp_path, *options)
    with phosd(bus, tmp_path), nothing_left(line):
        relay = line.start()
        line.wait_for(2)
        os.kill(relay.pid, signal.SIGTERM)
        assert relay.wait(60) == SAVED, line.said
        said = len(line.said)
        relay = line.start()
        wait_until(lambda: "goes on as process" in line.said[said:], "it to go on")
        line.wait_for(2)
        assert restarter(monkeypatch, line, tmp_path, relay.pid) == "unit bert.service"
        relay.kill()
        relay.wait()
        assert restarter(monkeypatch, line, tmp_path, relay.pid) == "", "nobody waits for it"
