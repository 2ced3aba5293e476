"""Clones: an image restored beside the program that it was made of, and several times."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine import (
    CheckpointOptions,
    Node,
    Progress,
    RestoreOptions,
    checkpoint,
    restore,
)
from phosd.engine.operations import move_checks
from phosd.engine.program.name import VARIABLE
from phosd.engine.program.namespace_maker import end
from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.cuda import is_software
from phosd.engine.system.sockets import unix_sockets
from phosd.errors import Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER
from tests.support.harness import (
    SELDOM,
    Target,
    has_two_gpus,
    parse,
    undisturbed,
    wait_until,
)


@pytest.fixture(autouse=True)
def _none_left(node: Node) -> Iterator[None]:
    yield
    for left in pid_namespaces.living(node.config.runtime_dir):
        end(left)


def _clone(node: Node, image: str, name: str, gpu: str = "") -> int:
    """Restore a clone. Returns its pid."""
    return restore(node, image, RestoreOptions(clone=name, gpu=gpu), Progress()).pid


def _values(target: Target, name: str, steps: int) -> dict[int, str]:
    """Wait until a clone has written so many steps to its log, and return all that are there."""
    log = Path(f"{target.log}.clone-{name}")
    wait_until(lambda: len(parse(log.read_bytes())) >= steps, f"{steps} steps in {log.name}")
    return parse(log.read_bytes())


@pytest.mark.parametrize(
    ("program", "mode"), [("single", "stop"), ("single", "driver"), ("tensor_queue", "stop")]
)
def test_original_and_clones_compute_right(
    node: Node, start: Starter, program: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has all steps in a log of its own, those before the checkpoint, too; a clone may be
    saved in turn, and cloned; one is on another GPU. In ``tensor_queue`` processes open each
    other's memory all the time.
    """
    target = start(program, extra={VARIABLE: "trial"})
    target.wait_for_steps(5)
    made = checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress())
    image = made.id
    if made.shares_memory:  # its kernels and the original's would collide
        with monkeypatch.context() as patch, pytest.raises(Unsupported, match="beside others"):
            if is_software():  # whose users NVML does not tell
                patch.setattr(move_checks, "users_of", lambda gpus: dict.fromkeys([target.pid], 0))
            _clone(node, image, "a")
        if not is_software():
            return
    pids = {"a": _clone(node, image, "a")}
    pids["b"] = _clone(node, image, "b", gpu="1" if has_two_gpus() else "")
    again = checkpoint(node, pids["a"], CheckpointOptions(mode=mode), Progress())
    assert (made.name, again.name) == ("trial", ""), "the name is the original's"
    pids["c"] = restore(node, again.id, RestoreOptions(clone="c"), Progress()).pid
    assert len({target.pid, *pids.values()}) == 4
    assert {procfs.own_id(pid) for pid in pids.values()} == {target.pid}
    for name in ("softgpu", "ipc") if is_software() else ("ipc",):
        beginning = f"@phos-{name}-{target.pid}-"
        found = [s.name for s in unix_sockets().values() if s.name.startswith(beginning)]
        assert len(found) == len({*found}) == 4, "each listens under a name of its own"
    for name in ("a", "b", "a.clone-c"):
        values = _values(target, name, 5 + AFTER)
        right = undisturbed(program, max(values) + 1, hooked=True)
        assert values == {step: right[step] for step in range(len(values))}
    target.more_steps(2)
    values = target.values()
    right = undisturbed(program, max(values) + 1, hooked=True, compared=target)
    assert values == {step: right[step] for step in range(len(values))}


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.rotated(of=8))])
def test_many_at_once(node: Node, start: Starter, count: int) -> None:
    """The original has ended; each clone has device memory of its own."""
    target = start("single", extra=SELDOM)
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(), Progress()).id
    target.kill()
    pids = [_clone(node, image, str(number)) for number in range(count)]
    listed = {each.pid: each for each in node.processes()}
    others = [each for each in listed.values() if each.pid not in pids]
    # The mover of a test beside this one is another phosd's.
    assert [each for each in others if "phosd.engine.mover" not in each.command] == []
    found = [listed[pid].device_bytes for pid in pids]
    assert len({*found}) == 1 and 0 not in found
    steps = 5 + max(len(_values(target, str(number), 0)) for number in range(count))
    for number in range(count):
        values = _values(target, str(number), steps)
        right = undisturbed("single", max(values) + 1)
        assert values == {step: right[step] for step in range(len(values))}
