"""A resumption fails when a hook has some of the memory already: the next goes on with the same."""

import errno
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.node.suspended import Register
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.startup import settle
from phosd.engine.system import cuda
from phosd.errors import Internal, PhosError, Timeout, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right, save
from tests.support.harness import Target, wait_until


def asleep(node: Node, target: Target) -> Target:
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    return target


def is_whole(node: Node, target: Target, undisturbed: Undisturbed) -> None:
    """It runs, and what phosd then saves and gives back is what it has."""
    assert not node.suspended.all() and not left_parked(node.config.runtime_dir)
    assert not node.suspend_store.shelf("memory").list()
    computes_right(target, undisturbed)
    save(node, target, "stop")
    computes_right(target, undisturbed)
    asleep(node, target)
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("fault", ["hook-import:2", "hook-map:1", "hook-map:2"])
def test_a_hook_fails_half_way(
    fault: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """It keeps what it has imported."""
    target = asleep(node, start("single", extra={"PHOS_FAULT": fault}))
    with pytest.raises(PhosError):
        resume(node, target.pid, ResumeOptions("1"), Progress())
    assert resume(node, target.pid, ResumeOptions(), Progress()) == {0: 1}
    is_whole(node, target, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("again", ["resume", "restart"])
def test_one_of_two_gets_nothing(
    late: bool,
    again: str,
    place: Path,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other runs by then, with memory that they share. Or the answer was late, or lost."""
    config = NodeConfig(place / "state", place / "run")
    target = start("shared_pair")
    asked: list[int] = []
    unpark = HookLink.unpark

    def second_fails(link: HookLink, memory: Iterable[tuple[int, int]]) -> int:
        asked.append(link.pid)
        if len(asked) != 2:
            return unpark(link, memory)
        if late:
            unpark(link, memory)
            link.close()
        raise Timeout("no answer", hint="wait")

    with Node(config) as node:
        asleep(node, target)
        with monkeypatch.context() as patch:
            patch.setattr(HookLink, "unpark", second_fails)
            with pytest.raises(Timeout, match="no answer"):
                resume(node, target.pid, ResumeOptions(), Progress())
        if again == "resume":
            resume(node, target.pid, ResumeOptions(), Progress())
            is_whole(node, target, undisturbed)
    if again == "restart":
        with Node(config) as node:
            settle(node, [])
            is_whole(node, target, undisturbed)


def test_a_gate_opens_when_all_have_their_memory(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the connections are held, whatever else happens."""
    target = asleep(node, start("shared_pair"))
    steps = len(target.values())
    unpark = HookLink.unpark
    links: list[HookLink] = []

    def note(link: HookLink, memory: Iterable[tuple[int, int]]) -> int:
        assert all(each.connected for each in links)
        links.append(link)
        return unpark(link, memory)

    monkeypatch.setattr(HookLink, "unpark", note)
    resume(node, target.pid, ResumeOptions(), Progress())
    assert len(links) == 2
    target.wait_for_steps(steps + 1)
    computes_right(target, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("program", ["single", "shared_pair"])
def test_its_entry_cannot_be_removed(
    program: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs by then, and the next attempt finds that."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no disk")

    target = asleep(node, start(program))
    with monkeypatch.context() as patch:
        patch.setattr(Register, "remove", fail)
        with pytest.raises(OSError, match="no disk"):
            resume(node, target.pid, ResumeOptions(), Progress())
    target.more_steps(2)
    resume(node, target.pid, ResumeOptions(), Progress())
    is_whole(node, target, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("program", ["single", "shared_pair"])
def test_the_movers_have_lost_what_was_loaded(
    program: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded anew it would be another memory than the one that the first process has."""
    target = asleep(node, start(program))
    asked: list[int] = []
    unpark = HookLink.unpark

    def last_fails(link: HookLink, memory: Iterable[tuple[int, int]]) -> int:
        asked.append(link.pid)
        if len(asked) == (2 if program == "shared_pair" else 1):
            raise Timeout("no answer", hint="wait")
        return unpark(link, memory)

    with monkeypatch.context() as patch:
        patch.setattr(HookLink, "unpark", last_fails)
        with pytest.raises(Timeout, match="no answer"):
            resume(node, target.pid, ResumeOptions(), Progress())
    mover = node.movers.mover(0)
    os.kill(mover.pid, signal.SIGKILL)
    wait_until(lambda: not mover.alive, "the end of the mover")
    if program == "single":
        resume(node, target.pid, ResumeOptions(), Progress())
        is_whole(node, target, undisturbed)
    else:
        for _ in range(2):
            with pytest.raises(Unsupported, match=f"process {asked[1]} is parked"):
                resume(node, target.pid, ResumeOptions(), Progress())
        assert not left_parked(node.config.runtime_dir)


def test_nothing_is_kept_of_an_attempt_that_gave_nothing(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one needs the room."""
    target = asleep(node, start("single"))
    real = cuda.call

    def call(name: str, *arguments: object, about: str = "") -> object:
        if name == "cuCheckpointProcessUnlock":
            raise Internal("it does not unlock", hint="wait")
        return real(name, *arguments, about=about)

    with monkeypatch.context() as patch:
        patch.setattr("phosd.engine.program.driver_checkpoint.call", call)
        with pytest.raises(Internal):
            resume(node, target.pid, ResumeOptions(), Progress())
    assert not left_parked(node.config.runtime_dir)
    resume(node, target.pid, ResumeOptions(), Progress())
    is_whole(node, target, undisturbed)
