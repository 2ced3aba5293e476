"""A program whose hook lies: phosd refuses, and neither it nor anybody else is harmed."""

import os
import time
from pathlib import Path

import pytest

from phosd.engine.hook_client.channel import DEADLINE
from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.wire import Type
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.errors import PhosError
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import save
from tests.node.checkpoint_restore.test_fault_points import lasting
from tests.node.concurrent.watch import slow_movers
from tests.support.harness import Target, undisturbed, users_hooks, wait_until
from tests.support.rotation import part

REQUESTS = (
    *(Type.HELLO, Type.LIST_BLOCKS, Type.EXPORT_BLOCKS, Type.CLOSE_GATE, Type.ARM, Type.PARK),
    *(Type.SEAL_GATE, Type.DETACH, Type.UNPARK_BLOCKS, Type.UNPARK, Type.OPEN_GATE, Type.DISARM),
)
NOTHING = 0
LIES = (
    *("silence", "goodbye", "rubbish", "endless", "another"),
    *("cut", "refusal", "numbers", "descriptors"),
)
PATIENCE = 1.5
"""Seconds that an answer of these hooks may take, so that silence is soon over."""
LIARS: set[int] = set()
"""The processes whose hooks these are."""
LONGEST = 60.0
"""Seconds after which a job with a silent hook must have ended."""


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    LIARS.clear()
    connect, reattach = HookLink.__init__, HookLink.reattach

    def soon(pid: int, deadline: float) -> float:
        return min(deadline, PATIENCE) if pid in LIARS else deadline

    def connect_soon(link: HookLink, pid: int, folder: Path, deadline: float = DEADLINE) -> None:
        connect(link, pid, folder, soon(pid, deadline))

    def reattach_soon(link: HookLink, deadline: float = DEADLINE) -> None:
        reattach(link, soon(link.pid, deadline))

    monkeypatch.setattr(HookLink, "__init__", connect_soon)
    monkeypatch.setattr(HookLink, "reattach", reattach_soon)


def start_hostile(start: Starter, place: Path, request: int, lie: str) -> Target:
    inside = place / "inside"
    users_hooks(inside)
    outside = users_hooks(place / "run")
    extra = {"PHOS_RUNTIME_DIR": str(inside), "PHOS_TEST_OUTSIDE": str(place / "run")}
    target = start("hostile", arguments=("0", f"{request:d}", lie), extra=extra)
    if request != NOTHING:
        LIARS.add(target.pid)
    target.wait_for_steps(2)
    socket = outside / f"{target.pid}.sock"
    wait_until(socket.exists, "the lying hook")
    return target


def nothing_kept(node: Node, before: int, lie: str) -> None:
    """The program has ended."""

    def closed() -> bool:
        node.processes()
        return lasting(os.getpid()) <= before

    wait_until(closed, f"descriptors to be closed ({lie})")


def attempt(node: Node, target: Target, lie: str) -> str:
    """The image of a checkpoint that may fail, but in a bounded time and with a reason."""
    began = time.monotonic()
    try:
        return checkpoint(node, target.pid, CheckpointOptions(), Progress()).id
    except PhosError as error:
        assert error.what, lie
        assert str(error).isprintable(), f"{lie}: a program steers the reader's terminal"
        return ""
    finally:
        assert time.monotonic() - began < LONGEST, lie


def unharmed(node: Node, honest: Target) -> None:
    """Another program is saved, and computes what it should."""
    honest.more_steps(2)
    save(node, honest, "auto")
    values = honest.values()
    assert values.items() <= undisturbed("single", max(values) + 1).items()


def test_a_hook_that_is_passed_on_without_a_lie(node: Node, start: Starter, place: Path) -> None:
    """Else every lie after the first might never be told."""
    target = start_hostile(start, place, NOTHING, "goodbye")
    for mode in ("concurrent", "stop"):
        assert save(node, target, mode).mode == mode
    target.more_steps(2)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.name.lower())
def test_a_hook_that_lies_at_one_request(
    request_: Type, node: Node, start: Starter, place: Path
) -> None:
    honest = start("single")
    honest.wait_for_steps(2)
    save(node, honest, "auto")
    for lie in part(f"lies at {request_.name}", LIES, 5):
        before, mover = lasting(os.getpid()), node.movers.mover(0).pid
        target = start_hostile(start, place, request_, lie)
        image = attempt(node, target, lie)
        target.kill()
        if image:  # a lie that changes nothing for phosd
            verify(node.store, image, Progress())
            node.store.delete(image)
        assert node.movers.mover(0).pid == mover, f"{lie}: the mover died"
        nothing_kept(node, before, lie)
    unharmed(node, honest)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("where", ["constants", "phases_and_frees", "tables", "everything"])
def test_a_program_that_writes_over_the_shared_board(
    where: str, node: Node, start: Starter, place: Path
) -> None:
    """It spoils its own checkpoint, if anything."""
    honest = start("single")
    honest.wait_for_steps(2)
    save(node, honest, "auto")
    before = lasting(os.getpid())
    target = start_hostile(start, place, Type.ARM, where)
    with slow_movers(node, target, 1.0):
        mover = node.movers.mover(0).pid
        for _ in range(3):
            attempt(node, target, where)
        assert node.movers.mover(0).pid == mover, "the mover died"
    target.kill()
    for image in node.store.list():
        verify(node.store, image.id, Progress())
    nothing_kept(node, before, where)
    unharmed(node, honest)
