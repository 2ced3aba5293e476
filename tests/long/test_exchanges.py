"""Three programs take turns on a GPU with room for one: no answer is wrong, and nothing grows."""

import contextlib
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from phosd.engine.system.freezer import with_those_below
from phosd.engine.system.procfs import process_id
from tests.node.checkpoint_restore.conftest import place, undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support.harness import start, wait_until
from tests.support.rotation import SEED, times
from tests.support.service import bus
from tests.system.service.test_end_to_end import phos, phosd
from tests.system.service.test_sleepers import Server, asked, connected, server

__all__ = ["bus", "place", "server", "undisturbed"]

EXCHANGES = times(16, everything=60, soak=1000)
_WARM = 6
"""Exchanges until pools of threads and caches are filled."""


class Sample(NamedTuple):
    """What phosd and its children have: bytes of memory, descriptors, threads and processes; and
    the files of suspended programs.
    """

    resident: int
    descriptors: int
    threads: int
    processes: int
    files: int


ROOM = Sample(32 << 20, 6, 4, 2, 0)
"""How much more there may be at the end."""


def sample(daemon: int, place: Path) -> Sample:
    known = process_id(daemon)
    assert known is not None
    found = []
    for pid in with_those_below([known]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            folder = Path(f"/proc/{pid}")
            resident = 4096 * int((folder / "statm").read_text().split()[1])
            numbers = (len([*(folder / name).iterdir()]) for name in ("fd", "task"))
            found.append((resident, *numbers, 1))
    resident, descriptors, threads, processes = map(sum, zip(*found, strict=True))
    walk = os.walk(place / "run/memory/suspended")
    files = sum(len(files) for _, _, files in walk)
    return Sample(resident, descriptors, threads, processes, files)


@pytest.mark.rotated(of=16)
@pytest.mark.timeout(60 + 20 * EXCHANGES)
def test_three_take_turns(bus: str, place: Path, server: Server, undisturbed: Undisturbed) -> None:
    chosen = random.Random(SEED)
    names = ["one", "two", "three"]
    for name in names:
        server(name)
    steps = dict.fromkeys(names, 0)
    right = undisturbed("single", EXCHANGES + 2)  # before the GPU is full
    samples: list[Sample] = []
    with phosd(bus, place) as daemon:
        for row in phos(bus, place, "ps"):
            phos(bus, place, "suspend", str(row["pid"]), "--idle", "600")
        with connected(place, "one") as caller:
            assert asked(caller)[0] == steps["one"]
        steps["one"] += 1
        full = start("filler", place, hooked=False, arguments=("0", str(4 << 20)))
        try:
            wait_until(lambda: b"took" in full.log.read_bytes(), "the memory to be taken")
            last = "one"
            for number in range(EXCHANGES):
                time.sleep(1.1)  # the one before has nothing to do
                last = chosen.choice([name for name in names if name != last])
                with connected(place, last) as caller:
                    step, digest = asked(caller)
                assert step == steps[last]
                assert right[step] == digest
                steps[last] += 1
                if number >= _WARM:
                    samples.append(sample(daemon.pid, place))
        finally:
            full.kill()
        events = [row for row in phos(bus, place, "events") if row["kind"] == "sleeper"]
        assert events == []
    early, late = samples[: len(samples) // 4 or 1], samples[-len(samples) // 4 :]
    for name, room in ROOM._asdict().items():
        before = max(getattr(each, name) for each in early)
        after = min(getattr(each, name) for each in late)
        assert after <= before + room, (name, before, after)
