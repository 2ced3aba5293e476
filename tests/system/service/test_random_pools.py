"""A pool under random starts, deaths, kills and restarts has what it should, and loses nobody."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phosd.engine.system.freezer import thaw_killed
from phosd.engine.system.procfs import ProcessId, process_id
from tests.node.checkpoint_restore.conftest import place, undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support.harness import Target, parse, wait_until
from tests.support.rotation import seeds, times
from tests.system.service.test_end_to_end import phos, phos_ended, phosd, phosd_that_ends
from tests.system.service.test_pools import pool, suspended, target

__all__ = ["place", "target", "undisturbed"]

OPERATIONS = times(15, everything=200, soak=200)
MOST = 5
"""Programs of the pool in all."""


@dataclass
class Life:
    """What users do with a pool, and what they know of it."""

    bus: str
    place: Path
    chosen: random.Random
    started: set[ProcessId] = field(default_factory=set)
    """What they were given, and have not ended."""
    resting: set[ProcessId] = field(default_factory=set)
    """What they have suspended of that."""

    def operations(self) -> list[Callable[[], None]]:
        acts = [self.start, self.start, self.start, self.end, self.kill_waiting, self.scale]
        return [*acts, self.suspend, self.resume]

    def start(self) -> None:
        done = phos_ended(self.bus, self.place, "start", "chat")
        if done.returncode:
            assert "as many as it may" in done.stderr, done.stderr
            return
        found = process_id(int(done.stdout))
        assert found is not None and found not in self.started
        self.started.add(found)

    def end(self) -> None:
        """It crashes, perhaps in its sleep."""
        if self.started:
            self._kill(self.chosen.choice(sorted(self.started)))

    def kill_waiting(self) -> None:
        waiting = sorted(suspended(self.bus, self.place) - {each.pid for each in self.resting})
        if waiting and (found := process_id(self.chosen.choice(waiting))) is not None:
            self._kill(found)

    def suspend(self) -> None:
        if awake := sorted(self.started - self.resting):
            chosen = self.chosen.choice(awake)
            words = ["--hollow"] if self.chosen.random() < 0.5 else []
            phos(self.bus, self.place, "suspend", str(chosen.pid), *words)
            self.resting.add(chosen)

    def resume(self) -> None:
        if self.resting:
            chosen = self.chosen.choice(sorted(self.resting))
            phos(self.bus, self.place, "resume", str(chosen.pid))
            self.resting.discard(chosen)

    def scale(self) -> None:
        sizes = {
            "--hollow": str(self.chosen.randint(0, 2)),
            "--ready": str(self.chosen.randint(0, 2)),
        }
        words = [word for option in sizes.items() for word in option]
        phos(self.bus, self.place, "pool", "scale", "chat", *words)

    def _kill(self, process: ProcessId) -> None:
        os.kill(process.pid, signal.SIGKILL)
        thaw_killed([process.pid])
        wait_until(lambda: process_id(process.pid) != process, "it to end")
        self.started.discard(process)
        self.resting.discard(process)

    def check(self) -> None:
        """All that was given to users lives, and the pool knows it; there is never too much."""
        assert all(process_id(each.pid) == each for each in self.started)
        found = pool(self.bus, self.place)
        assert found["waiting"] + found["running"] <= MOST
        known = len(self.started)
        wait_until(lambda: pool(self.bus, self.place)["running"] == known, f"{known} that run")


def lives(chosen: random.Random) -> Iterator[tuple[int, int]]:
    """Yield how many operations each phosd lives for, and how it ends."""
    left = OPERATIONS
    while left > 0:
        count = min(left, chosen.randint(3, 12))
        yield count, -signal.SIGKILL if chosen.random() < 0.5 else 0
        left -= count


@pytest.mark.rotated(of=16)
@pytest.mark.timeout(120 + 10 * OPERATIONS)
@pytest.mark.parametrize("seed", seeds("random pools", 1, whole=1))
def test_a_pool_has_what_it_should(
    seed: int, bus: str, place: Path, target: Target, undisturbed: Undisturbed
) -> None:
    life = Life(bus, place, random.Random(seed))
    with phosd(bus, place):
        image = str(phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"])
        phos(bus, place, "pool", "create", "chat", image, "--hollow", "1", "--max", str(MOST))
    for count, status in lives(life.chosen):
        with phosd_that_ends(status, bus, place) as daemon:
            for _ in range(count):
                life.chosen.choice(life.operations())()
                life.check()
            if status:
                daemon.kill()
    with phosd(bus, place):
        life.check()
        for each in sorted(life.resting):
            phos(bus, place, "resume", str(each.pid))
        hollow = MOST - len(life.started)
        phos(bus, place, "pool", "scale", "chat", "--hollow", str(hollow), "--ready", "0")
        wait_until(lambda: pool(bus, place)["waiting"] == hollow, "those that wait")
        assert len(suspended(bus, place)) == hollow
        phos(bus, place, "pool", "rm", "chat")
        assert not suspended(bus, place)
        assert all(process_id(each.pid) == each for each in life.started)
    logs = sorted(place.glob("single.log.clone-chat-*"))
    assert len(logs) >= len(life.started)
    for log in logs:  # each is what its program has computed, up to where it was killed
        values = parse(log.read_bytes())
        right = undisturbed("single", max(values) + 1)
        assert values == {step: right[step] for step in range(len(values))}, log
