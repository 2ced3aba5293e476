"""The register of suspended programs: root's own, and nobody's word is taken for what is in it."""

import logging
import os
from pathlib import Path

import msgspec
import pytest

from phosd.engine.node.suspended import HOLLOW, Register, Suspended
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchProcess, PhosError, Unsupported


def entry(image: str, *processes: ProcessId) -> Suspended:
    pid, start = processes[0]
    return Suspended(
        image=image,
        pid=pid,
        start_time=start,
        owner=1000,
        command=("python", "train.py"),
        since=1.5,
        where="memory",
        stored_bytes=4096,
        device_bytes={1: 5, 0: 7},
        processes=processes,
    )


@pytest.fixture
def me() -> ProcessId:
    found = procfs.process_id(os.getpid())
    assert found is not None
    return found


def test_what_was_written_is_there_until_it_is_removed(tmp_path: Path, me: ProcessId) -> None:
    register = Register(tmp_path)
    assert register.all() == []
    suspended = entry("b", me)
    register.write(suspended)
    assert Register(tmp_path).all() == register.living() == [suspended]
    assert suspended.gpus == (0, 1)
    assert register.of(me.pid) == suspended
    with pytest.raises(Busy, match=f"process {me.pid} is suspended") as raised:
        register.require_awake([1, me.pid])
    assert f"phos resume {me.pid}" in raised.value.hint
    register.remove(suspended)
    register.remove(suspended)
    assert register.all() == []
    register.require_awake([me.pid])


def test_a_process_with_the_pid_of_a_dead_one_is_not_suspended(
    tmp_path: Path, me: ProcessId
) -> None:
    register = Register(tmp_path)
    register.write(entry("a", ProcessId(me.pid, me.start_time + 1)))
    assert register.living() == []
    assert len(register.all()) == 1
    register.require_awake([me.pid])
    with pytest.raises(NoSuchProcess, match="not suspended"):
        register.of(me.pid)


def test_who_is_left_of_a_program_is_named(me: ProcessId) -> None:
    """It stands still until somebody ends it."""
    gone = ProcessId(me.pid, me.start_time + 1)
    entry("a", me).require_alive()
    with pytest.raises(NoSuchProcess, match=f"process {1 << 22} has ended") as raised:
        entry("a", me, ProcessId(1 << 22, 1)).require_alive()
    assert f"`kill -9 {me.pid}`" in raised.value.hint
    with pytest.raises(NoSuchProcess) as raised:
        entry("a", gone).require_alive()
    assert "kill" not in raised.value.hint


def test_what_another_version_has_suspended_is_told_by_its_name(
    tmp_path: Path, me: ProcessId, caplog: pytest.LogCaptureFixture
) -> None:
    register = Register(tmp_path)
    register.write(entry("a", me))
    path = tmp_path / "suspended" / "a.json"
    mine = msgspec.json.decode(path.read_bytes())
    for written in (
        {"format": HOLLOW + 1, "phosd": "7.1"},
        {"phosd": "7.1", "colour": "red"},
    ):
        path.write_bytes(msgspec.json.encode(mine | written))
        with pytest.raises(Unsupported, match=r"was suspended by phosd 7\.1 in format .*; install"):
            register.of(me.pid)
        assert register.all() == [] and register.images() == {"a"}
        assert "suspended by phosd 7.1" in caplog.text
    without = {name: value for name, value in mine.items() if name not in ("format", "phosd")}
    path.write_bytes(msgspec.json.encode(without))  # as before these were noted
    assert register.of(me.pid) == entry("a", me)


def test_garbage_is_passed_over_and_told(
    tmp_path: Path, me: ProcessId, caplog: pytest.LogCaptureFixture
) -> None:
    register = Register(tmp_path)
    suspended = entry("good", me)
    register.write(suspended)
    folder = tmp_path / "suspended"
    whole = msgspec.json.encode(suspended)
    for name, content in (
        ("empty", b""),
        ("half", whole[:-20]),
        ("more", whole[:-1] + b',"extra":1}'),
        ("kind", whole.replace(b'"pid":', b'"pid":"x","_":')),
    ):
        path = folder / f"{name}.json"
        path.write_bytes(content)
        path.chmod(0o600)
    with caplog.at_level(logging.ERROR):
        assert register.all() == [suspended]
    assert caplog.text.count("does not tell who is suspended") == 4


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_that_others_may_enter_is_not_trusted(
    tmp_path: Path, me: ProcessId, mode: int
) -> None:
    register = Register(tmp_path)
    register.write(entry("a", me))
    (tmp_path / "suspended").chmod(mode)
    with pytest.raises(PhosError, match="suspended"):
        register.all()


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path, me: ProcessId) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "suspended").symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError, match="suspended"):
        Register(tmp_path).write(entry("a", me))
    assert list(elsewhere.iterdir()) == []
