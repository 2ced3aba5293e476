"""What belongs together: trees and sharers of memory, found among processes that a test invents."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from phosd.engine.hook_client.link import BlockFlag, Hello, HookBlock, HookState
from phosd.engine.job.progress import Progress
from phosd.engine.memory.exported import ExportedBlock
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.program import (
    cuda_tools,
    discovery,
    driver_checkpoint,
    process,
    process_gpus,
)
from phosd.engine.program import group as module
from phosd.engine.program.discovery import discover_group
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.system import procfs
from phosd.errors import Busy, InvalidOption, NoSuchProcess, PhosError, Reason, Timeout, Unsupported
from tests.support.fake_hook import files, open_files

ALICE, BOB = 1000, 1001


@dataclass
class Invented:
    """An invented node: a process tree by its root, hooks, and who has which shared memory."""

    trees: dict[int, list[int]] = field(default_factory=dict)
    shared: dict[int, list[int]] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    hooked: set[int] = field(default_factory=set)
    states: dict[int, State | None] = field(default_factory=dict)
    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    trouble: dict[tuple[str, int], PhosError] = field(default_factory=dict)
    open_links: set[int] = field(default_factory=set)

    def program(
        self, pid: int, *below: int, memory: tuple[int, ...] = (), uid: int = ALICE
    ) -> None:
        """A hooked GPU program and the processes below it."""
        self.trees[pid] = [pid, *below]
        for each in (pid, *below):
            self.trees.setdefault(each, [each])
            self.hooked.add(each)
            self.users[each] = uid
        self.shared[pid] = list(memory)


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invented:
    node = Invented()

    class Link:
        def __init__(self, pid: int, runtime: Path, deadline: float = 30.0) -> None:
            self.pid = pid

        def connect(self) -> Self:
            self._fail("connect")
            if self.pid not in node.hooked:
                raise NoSuchProcess("no hook")
            node.open_links.add(self.pid)
            return self

        def close(self) -> None:
            node.open_links.discard(self.pid)

        def __enter__(self) -> Self:
            return self.connect()

        def __exit__(self, *_: object) -> None:
            self.close()

        def hello(self) -> Hello:
            self._fail("hello")
            devices = node.devices.get(self.pid, ("GPU-a",))
            return Hello(self.pid, 13000, devices, HookState.RUNNING, True, False, False, True, "")

        def list_blocks(self, after: int = 0) -> list[HookBlock]:
            self._fail("list")
            flags = BlockFlag.HAS_DESCRIPTOR | BlockFlag.EXPORTED
            memory = enumerate(node.shared.get(self.pid, []), 1)
            return [HookBlock(i, 0, 1, 0, flags) for i, _ in memory]

        def export_blocks(
            self, after: int = 0, most: int = 0
        ) -> Iterator[tuple[HookBlock, int | None]]:
            for block, file in zip(self.list_blocks(), node.shared[self.pid], strict=True):
                yield block, os.dup(file)

        def _fail(self, step: str) -> None:
            if (step, self.pid) in node.trouble:
                raise node.trouble[step, self.pid]

    def scan(pid: int) -> Any:
        members = [SimpleNamespace(pid=p, uid=node.users[p]) for p in node.trees[pid]]
        return FakeTree(members)

    class Listeners:
        def __init__(self, runtime: Path) -> None:
            self._hooks = runtime / "hook"

        def pids(self) -> list[int]:
            return sorted(int(path.stem) for path in self._hooks.glob("*.sock"))

    monkeypatch.setattr(module, "Listeners", Listeners)
    for each in (module, discovery):
        monkeypatch.setattr(each, "HookLink", Link)
    monkeypatch.setattr(discovery, "scan", scan)
    monkeypatch.setattr(process, "uses_cuda", lambda pid: pid in node.trees)
    # A real process may have an invented pid.
    monkeypatch.setattr(cuda_tools, "tool_in", lambda pid: "")
    monkeypatch.setattr(process_gpus, "visible_gpus", lambda pid: [0])
    monkeypatch.setattr(process_gpus, "gpu_uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.setattr(driver_checkpoint, "state", lambda pid: node.states.get(pid, State.RUNNING))
    monkeypatch.setattr(procfs, "status", lambda pid: SimpleNamespace(uids=[node.users[pid]]))
    return node


class FakeTree(list[Any]):
    @property
    def root(self) -> Any:
        return self[0]

    @property
    def living(self) -> list[Any]:
        return self

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(p.pid for p in self)


def pids_of_unit(node: Invented, pid: int, runtime: Path) -> list[int]:
    """The processes of the group of ``pid``; nothing stays open afterwards."""
    hooks = runtime / "hook"
    hooks.mkdir(exist_ok=True)
    for hooked in node.hooked:
        (hooks / f"{hooked}.sock").touch()
    before = open_files()
    try:
        with discover_group(pid, runtime, lambda tree: None) as group:
            return sorted(group.pids)
    finally:
        assert not node.open_links
        assert open_files() == before


@pytest.fixture
def memory() -> Iterator[list[int]]:
    made = files(4)
    yield made
    for file in made:
        os.close(file)


def test_sharers_of_sharers_belong_to_it(
    invented: Invented, tmp_path: Path, memory: list[int]
) -> None:
    """Whatever the order in which they are met."""
    one, two, three, four = memory
    invented.program(50, memory=(one,))
    invented.program(40, memory=(one, two))
    invented.program(10, memory=(two, three))  # met first, and shares only with 40
    invented.program(60, memory=(three,))
    invented.program(30, memory=(four,))
    assert pids_of_unit(invented, 50, tmp_path) == [10, 40, 50, 60]
    assert pids_of_unit(invented, 30, tmp_path) == [30]


def test_a_tree_is_never_in_it_twice(invented: Invented, tmp_path: Path, memory: list[int]) -> None:
    one, *_ = memory
    invented.program(10, 11, memory=(one,))
    invented.shared[11] = [one]
    assert pids_of_unit(invented, 10, tmp_path) == [10, 11]
    with pytest.raises(Unsupported, match=r"process 10 shares .* with process 11, which is below"):
        pids_of_unit(invented, 11, tmp_path)


def test_another_users_hook_cannot_stand_in_the_way(
    invented: Invented, tmp_path: Path, memory: list[int]
) -> None:
    """One's own can: whether it shares memory must be known."""
    one, *_ = memory
    invented.program(10, memory=(one,))
    invented.program(20, memory=(one,), uid=BOB)
    invented.trouble["list", 20] = Timeout("no answer", hint="wait")
    assert pids_of_unit(invented, 10, tmp_path) == [10]
    invented.users[20] = ALICE
    with pytest.raises(Timeout):
        pids_of_unit(invented, 10, tmp_path)


def test_what_several_users_have_is_roots(
    invented: Invented, tmp_path: Path, memory: list[int]
) -> None:
    one, *_ = memory
    invented.program(10, memory=(one,))
    invented.program(20, memory=(one,), uid=BOB)
    (tmp_path / "hook").mkdir()
    for alone, owner in ((True, BOB), (False, 0)):
        with discover_group(20, tmp_path, lambda tree: None) as group:
            assert (group.pids == [20], group.owner) == (alone, owner)
        (tmp_path / "hook" / "10.sock").touch()


@pytest.mark.parametrize("step", ["connect", "hello"])
def test_a_hook_that_fails_is_not_a_missing_hook(
    invented: Invented, tmp_path: Path, step: str
) -> None:
    """Else the driver would save what was parked before, and lose it."""
    invented.program(10)
    trouble = Timeout if step == "connect" else NoSuchProcess
    invented.trouble[step, 10] = trouble("it fails", hint="try again")
    with pytest.raises(trouble, match="it fails"):
        pids_of_unit(invented, 10, tmp_path)


def test_processes_of_which_the_driver_knows_nothing(invented: Invented, tmp_path: Path) -> None:
    invented.program(10, 11)
    invented.states[11] = None
    with discover_group(10, tmp_path, lambda tree: None) as group:
        assert group.gpu_pids == [10] and group.pids == [10, 11]
    invented.states[10] = None
    with pytest.raises(NoSuchProcess, match="GPU process"):
        pids_of_unit(invented, 10, tmp_path)
    invented.states[10] = State.LOCKED
    with pytest.raises(Unsupported, match="locked"):
        pids_of_unit(invented, 10, tmp_path)


def test_why_a_mode_is_not_possible(invented: Invented, tmp_path: Path, memory: list[int]) -> None:
    invented.program(10, memory=(memory[0],))
    with discover_group(10, tmp_path, lambda tree: None) as group:
        assert group.why_not_parked() is None
        assert "shares device memory" in group.why_not_by_driver()
    invented.hooked.clear()
    with discover_group(10, tmp_path, lambda tree: None) as group:
        why_not = group.why_not_parked()
        assert why_not is not None and why_not.reason == Reason.NO_HOOK
        assert "without the hook" in str(why_not)
        assert group.why_not_by_driver() == ""


def test_a_hook_says_which_gpus_the_process_uses(invented: Invented, tmp_path: Path) -> None:
    """Not the environment: the program may have changed that before it started CUDA."""
    invented.program(10, 11)
    invented.devices[10] = ("GPU-b", "GPU-a")
    with discover_group(10, tmp_path, lambda tree: None) as group:
        assert [m.gpus for m in group.members] == [[1, 0], [0]]
    invented.devices[11] = ("GPU-a", "MIG-c")
    with pytest.raises(Unsupported, match=r"11 uses MIG-c, which is none .* \(GPU-a, GPU-b\)"):
        pids_of_unit(invented, 10, tmp_path)
    assert not invented.open_links


def test_who_has_come_to_share_memory(
    invented: Invented, tmp_path: Path, memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by its descriptors: nobody is asked. A process that has them and no hook is phosd or a
    mover, whatever sockets somebody puts there.
    """
    shared, other, *_ = memory
    invented.program(10, memory=(shared,))
    hooked: set[int] = set()
    monkeypatch.setattr(process, "has_hook", hooked.__contains__)
    monkeypatch.setattr(process, "is_gpu_process", lambda pid: True)
    hooks = tmp_path / "hook"
    hooks.mkdir()
    flags = BlockFlag.HAS_DESCRIPTOR | BlockFlag.EXPORTED
    exported = ExportedBlock(10, HookBlock(1, 0, 1, 0, flags), 0, shared, 1)
    with (
        discover_group(10, tmp_path, lambda tree: None) as group,
        subprocess.Popen(["/bin/sleep", "60"], pass_fds=(shared, other)) as peer,
        subprocess.Popen(["/bin/sleep", "60"], pass_fds=(other,)) as stranger,
    ):
        for pid in (10, peer.pid, stranger.pid, os.getpid(), 1 << 22):
            (hooks / f"{pid}.sock").touch()
        try:
            group.require_no_sharers([exported])
            hooked |= {peer.pid, stranger.pid}
            group.require_no_sharers([])
            with pytest.raises(Busy, match=f"process 10 has begun .* with process {peer.pid};"):
                group.require_no_sharers([exported])
            (hooks / f"{peer.pid}.sock").unlink()
            group.require_no_sharers([exported])
        finally:
            peer.kill()
            stranger.kill()


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf")])
def test_deadlines_that_make_no_sense(deadline: float) -> None:
    with pytest.raises(InvalidOption, match="deadline"):
        checkpoint(cast(Node, None), 1, CheckpointOptions(deadline=deadline), Progress())
