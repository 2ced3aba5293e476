"""A program that lives is in each list, whatever the look at it meets."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.program import process
from phosd.engine.program.process import GpuProcess, list_processes
from phosd.engine.system import procfs
from phosd.engine.system.restarters import Restarters
from phosd.errors import NoSuchProcess


@contextmanager
def free(_: int) -> Iterator[bool]:
    yield True


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        monkeypatch.setattr(procfs, "pids", lambda: [os.getpid(), sleeping.pid])
        monkeypatch.setattr(process, "uses_cuda", lambda pid: pid == sleeping.pid)
        yield sleeping
        sleeping.kill()


def found(folder: Path, known: dict[int, GpuProcess]) -> list[GpuProcess]:
    return list_processes(folder, free, Restarters(), known=known)


def no_such(*_: Any, **__: Any) -> None:
    raise NoSuchProcess("its socket is gone", hint="")


def no_file(*_: Any, **__: Any) -> None:
    raise FileNotFoundError("a thread that has ended")


def nothing(*_: Any, **__: Any) -> None:
    return None


@pytest.mark.parametrize("look", [no_such, no_file, nothing])
def test_one_that_cannot_be_looked_at_is_listed_as_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: "subprocess.Popen[bytes]",
    look: Any,
) -> None:
    start = procfs.process_id(program.pid)
    assert start is not None
    before = GpuProcess(
        pid=program.pid,
        start_time=start.start_time,
        uid=0,
        command=("sleep", "600"),
        gpus=(0,),
        device_bytes=5,
        hook_state="hooked",
        reason="",
        state="running",
    )
    monkeypatch.setattr(process, "describe", look)
    assert found(tmp_path, {}) == [], "it may be none that uses a GPU"
    (listed,) = found(tmp_path, {program.pid: before})
    assert (listed.pid, listed.device_bytes) == (program.pid, 5)
    assert listed.reason == "it could not be looked at"
    replaced = replace(before, command=("train",))
    assert found(tmp_path, {program.pid: replaced}) == [], "it has become another program"
    program.kill()
    program.wait()
    assert found(tmp_path, {program.pid: before}) == []
