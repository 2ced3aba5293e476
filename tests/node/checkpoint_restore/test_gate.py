"""The gate closes on running code, at random instants, and the program never notices."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from phosd.engine.hook_client import long_work
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.program.discovery import discover_group
from phosd.errors import Busy
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, bring_back, check
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support import harness
from tests.support.harness import wait_until
from tests.support.records import naming
from tests.support.rotation import EVERYTHING, SEED

DEADLINE = 5.0
CLOSINGS = {
    # Ordinary programs; `threads` has kernels that wait for other launches.
    "threads": 40,
    "features": 40,
    "churn": 40,
    "shared_pair": 40,
    # What runs depends on what is held.
    "waiting_pair": 80,
    "waiting_devices": 80,
    # A copy that waits for the device keeps the driver from answering the hook, too.
    "waiting_pair copies": 80,
    "waiting_devices copies": 80,
    "stream_values": 80,
    "callback_lock": 80,
    "capture": 80,
}


def test_there_are_enough_closings() -> None:
    assert sum(CLOSINGS.values()) >= 500


def closings_of(program: str) -> int:
    """How often a program's gate is closed: a fifth of the times, unless everything is played."""
    return CLOSINGS[program] if EVERYTHING else CLOSINGS[program] // 5


@pytest.mark.parametrize("program", CLOSINGS)
def test_closing_at_random_instants(
    program: str,
    node: Node,
    start: Starter,
    record_property: Callable[[str, object], None],
) -> None:
    """Each time it closes, or gives up by its deadline; the programs run without a pause."""
    name, *words = program.split()
    target = start(name, arguments=("0", *words), extra={"PHOS_TEST_PACE": "0"})
    target.wait_for_steps(2)
    chance = random.Random(f"{program} {SEED}")
    closings = closings_of(program)
    settled, longest = 0, 0.0
    with discover_group(target.pid, node.config.runtime_dir, lambda tree: None) as group:
        named = naming(*group.pids)
        assert len(group.links) == (2 if name.endswith("_pair") else 1)
        for _ in range(closings):
            time.sleep(chance.random() * 0.04)
            began = time.monotonic()
            try:
                with closed_gates(group.links, named, deadline=DEADLINE):
                    longest = max(longest, time.monotonic() - began)
                    assert held(target.position, group.links), "the program went on"
                    settled += 1
            except Busy:
                target.more_steps(1)
            assert time.monotonic() - began < DEADLINE + 5
    target.more_steps(3)
    print(f"{program}: settled {settled} of {closings}, within {1000 * longest:.0f} ms")
    record_property("settled", f"{settled} of {closings}")
    assert settled >= closings * 9 // 10
    target.kill()
    values = target.values()
    assert values.items() <= harness.undisturbed(name, max(values) + 1, *words).items()


def test_a_device_that_is_never_idle(node: Node, start: Starter) -> None:
    """What is admitted is no more than it can do until the deadline, although it takes long."""
    target = start("window", extra={"PHOS_TEST_PACE": "0", "PHOS_SOFTGPU_LATENCY": "0.03"})
    target.wait_for_steps(8)
    with discover_group(target.pid, node.config.runtime_dir, lambda tree: None) as group:
        named = naming(*group.pids)
        for _ in range(2):
            with closed_gates(group.links, named, deadline=DEADLINE):
                assert held(target.position, group.links), "the program went on"
            target.more_steps(8)
    target.kill()
    values = target.values()
    assert values.items() <= harness.undisturbed("window", max(values) + 1).items()


@pytest.mark.parametrize("way", ["stream", "context", "event", "copy"])
def test_a_thread_that_waits_for_long(
    way: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Not longer than the deadline: what it waits for is named, and nothing has happened to it."""
    target = start("blocked", arguments=("0", way))
    target.wait_for_steps(2)
    hold = target.log.parent / "hold"
    hold.touch()
    wait_until(lambda: b"held" in target.log.read_bytes(), "the kernel to wait")
    short = CheckpointOptions(mode="stop", deadline=0.3)
    with pytest.raises(Busy, match=rf"within 0\.3 s \(process {target.pid} keeps its GPU busy"):
        checkpoint(node, target.pid, short, Progress())
    threading.Timer(0.3, hold.unlink).start()
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop", deadline=60), Progress())
    target.more_steps(AFTER)
    target.kill()
    check(bring_back(node, target, image.id), target.values(), undisturbed("blocked"))


@pytest.mark.parametrize("way", ["stream", "copy"])
def test_a_kernel_that_runs_for_long_is_awaited_while_the_program_runs(
    way: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where the program is in a call that waits for the kernel: then nobody can ask what has
    been submitted (hazard 53).
    """
    monkeypatch.setattr(long_work, "LONG", 0.2)
    target = start("blocked", arguments=("0", way))
    target.wait_for_steps(2)
    hold = target.log.parent / "hold"
    hold.touch()
    wait_until(lambda: b"held" in target.log.read_bytes(), "the kernel to wait")
    progress = at_phase("quiesce", lambda _: threading.Timer(1.0, hold.unlink).start())
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop", deadline=60), progress)
    names = [phase.name for phase in progress.phases][:4]
    if way == "stream":
        assert names == ["prepare", "quiesce", "prepare", "quiesce"]
        assert any("for long kernels of the program, while it ran" in n for n in progress.notes)
    else:
        assert names == ["prepare", "quiesce", "digest", "drain"]
    target.more_steps(AFTER)
    target.kill()
    check(bring_back(node, target, image.id), target.values(), undisturbed("blocked"))


def held(position: Callable[[], int], links: list[HookLink]) -> bool:
    """Whether at most the line of a step that was computed before still appears."""
    before = position()
    time.sleep(0.02)
    return position() - before <= 64
