"""Programs that are moved, suspended and resumed at random instants, while they and others compute.

``python -m tests.node.moves.random_moves --devices 4 --seed 1 --steps 20 PROGRAM...`` does it on so
many software GPUs, and says in the end what went wrong, if anything did. ``PROGRAM@2`` sees only
GPU 2.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from phosd.engine.job.progress import Progress
from phosd.engine.memory import precopy_rounds
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from tests.node.checkpoint_restore.cycle import all_compute_right
from tests.support import harness
from tests.support.harness import Target, children

NOT_BY_DRIVER = ("shared_pair", "waiting_pair", "waiting_devices")
"""The driver alone cannot save what they share, or waits for ever for kernels that wait."""
INSTANT = 0.03
"""A move begins within so many seconds after the one before it."""


def gpus_of(node: Node, target: Target) -> tuple[int, ...]:
    """The GPUs on which the target's processes have memory, by ordinal."""
    pids = {target.pid, *children(target.pid)}
    return tuple(sorted({g for p in node.processes() if p.pid in pids for g in p.gpus}))


class Walk:
    """Random moves of ``targets`` on a node with ``count`` GPUs, the same for the same seed."""

    def __init__(self, node: Node, targets: Sequence[Target], count: int, seed: int) -> None:
        self._node, self._targets, self._count = node, targets, count
        self._chance = random.Random(seed)
        self._asleep: dict[int, tuple[int, ...]] = {}
        self._where = {target.pid: gpus_of(node, target) for target in targets}
        self.done: list[str] = []

    def step(self) -> None:
        """One move of one of the targets, which is where it should be afterwards."""
        target = self._chance.choice(self._targets)
        time.sleep(self._chance.uniform(0, INSTANT))
        if target.pid in self._asleep:
            self._wake(target)
        else:
            self._chance.choice((self._move, self._move, self._sleep))(target)

    def wake_all(self) -> None:
        """Let them all run."""
        for target in self._targets:
            if target.pid in self._asleep:
                self._wake(target)

    def _move(self, target: Target) -> None:
        to = self._elsewhere(target)
        moves = ",".join(f"{old}:{new}" for old, new in to.items())
        modes = ("auto",) if target.program in NOT_BY_DRIVER else ("auto", "auto", "driver")
        options = MigrateOptions(moves, mode=self._chance.choice(modes))
        self.done.append(f"{target.program}: migrate {moves} ({options.mode})")
        moved = migrate(self._node, target.pid, options, Progress())
        assert moved == {old: new for old, new in to.items() if old != new}, self.done
        self._arrived(target, to.values())

    def _sleep(self, target: Target) -> None:
        where = self._chance.choice(("memory", "memory", "disk"))
        self.done.append(f"{target.program}: suspend to {where}")
        before = target.values()
        suspend(self._node, target.pid, SuspendOptions(where=where), Progress())
        assert gpus_of(self._node, target) == (), self.done
        assert before.items() <= target.values().items()
        self._asleep[target.pid] = self._where[target.pid]

    def _wake(self, target: Target) -> None:
        if self._chance.random() < 0.5:
            self.done.append(f"{target.program}: resume")
            resume(self._node, target.pid, ResumeOptions(), Progress())
            self._arrived(target, self._where[target.pid])
        else:
            to = self._elsewhere(target)
            moves = ",".join(f"{old}:{new}" for old, new in to.items())
            self.done.append(f"{target.program}: resume {moves}")
            resume(self._node, target.pid, ResumeOptions(moves), Progress())
            self._arrived(target, to.values())
        del self._asleep[target.pid]

    def _elsewhere(self, target: Target) -> dict[int, int]:
        """Other GPUs for some or all that the target has."""
        old = self._where[target.pid]
        while True:
            new = self._chance.sample(range(self._count), len(old))
            if new != [*old]:
                return dict(zip(old, new, strict=True))

    def _arrived(self, target: Target, expected: Iterable[int]) -> None:
        where = gpus_of(self._node, target)
        assert where == tuple(sorted(expected)), (self.done, where)
        self._where[target.pid] = where


def undisturbed(program: str, steps: int = 60, compared: Target | None = None) -> dict[int, str]:
    """What the program computes in so many steps, at least, when nobody touches it."""
    return harness.undisturbed(program, steps, compared=compared)


def walk(node: Node, targets: Sequence[Target], count: int, seed: int, steps: int) -> Walk:
    """``steps`` random moves; then all run, and none has computed anything wrong."""
    made = Walk(node, targets, count, seed)
    for _ in range(steps):
        made.step()
    made.wake_all()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("programs", nargs="+")
    options = parser.parse_args()
    os.environ["PHOS_SOFTGPU_DEVICES"] = str(options.devices)
    place = Path(tempfile.mkdtemp(prefix="phos-"))
    os.environ["PHOS_SOFTGPU_DIR"] = str(place / "gpu")
    os.environ["PHOS_GPU"] = "soft"
    precopy_rounds._LITTLE = 0  # the programs are small
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, place)
        node = stack.enter_context(Node(NodeConfig(place / "state", place / "run")))
        targets = []
        for words in options.programs:
            program, _, seen = words.partition("@")
            extra = {"CUDA_VISIBLE_DEVICES": seen} if seen else {}
            targets.append(harness.start(program, place, runtime=place / "run", extra=extra))
            stack.callback(targets[-1].kill)
        for target in targets:
            target.wait_for_steps(3)
        made = walk(node, targets, options.devices, options.seed, options.steps)
        all_compute_right(undisturbed, *targets)
        print("\n".join(made.done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
