"""phosd ends and another one starts, under a phos-tui that runs."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from phosd.client.records import Image, Process
from phosd.engine.program.process import GpuProcess
from phosd.service.config import Config
from phosd.service.process_identity import identify
from phosd.tui.link import BusLink
from phosd.tui.node import Node
from phosd.tui.widgets.table import RecordTable
from tests.support.fake_engine import FakeEngine, manifest, this_process
from tests.support.service import Service, serving
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import text

PID = os.getpid()


def others(count: int) -> list[GpuProcess]:
    """Processes that exist for the fake engine only."""
    return [this_process(pid=2**22 + n, command=("eval", f"{n}.py")) for n in range(count)]


@pytest.fixture
def engine() -> FakeEngine:
    """Return an engine with this test's process and others, and two images."""
    engine = FakeEngine()
    engine.running = [this_process(start_time=identify(PID).start_time), *others(5)]
    engine.stored = {"old": manifest("old"), "young": manifest("young")}
    engine.go.set()
    return engine


@asynccontextmanager
async def served(bus: str, folder: Path, engine: FakeEngine) -> AsyncIterator[Service]:
    """A phosd, which is another one each time; beside the event loop, on which it waits."""
    config = Config(state_dir=folder / "state", runtime_dir=folder / "run", rescan_seconds=0.5)
    config.runtime_dir.mkdir(exist_ok=True)
    service = serving(bus, config, engine)
    try:
        yield await asyncio.to_thread(service.__enter__)
    finally:
        await asyncio.to_thread(service.__exit__, None, None, None)


async def goes(pilot: Pilot[None], service: Service) -> None:
    """phosd is gone at once, and phos-tui says so and waits."""
    service.disconnect()
    await until_shown(pilot, "✗ No phosd for", "phosd --session", "What is shown is", "✗ phosd")


async def is_back(pilot: Pilot[None]) -> None:
    """Without a key, phos-tui has found the next one."""
    await until_shown(pilot, "● phosd")
    await until(pilot, lambda: "No phosd" not in text(pilot), "the banner to go")


def test_all_is_as_it_was_when_the_next_one_is_there(
    bus: str, tmp_path: Path, engine: FakeEngine
) -> None:
    async def body() -> None:
        node = Node(BusLink(bus))
        async with opened(node, LARGE) as pilot:
            app = pilot.app
            await until_shown(pilot, "✗ No phosd for", "phosd --session")
            async with served(bus, tmp_path, engine) as first:
                await is_back(pilot)
                await until_shown(pilot, "python tra", "4.py")
                await pilot.press("end", "space", "up", "up")  # one mark, the cursor elsewhere
                await pilot.press("o", "O", "slash", *"eval", "enter")
                await until_shown(pilot, "5 of 6", "1 marked")
                processes = app.screen.query_one(RecordTable)
                state = (processes.current, processes.chosen, processes.sort, processes.descending)
                assert [p.pid for p in processes.chosen] == [2**22 + 4]
                await pilot.press("3")
                await until_shown(pilot, "young")
                await pilot.press("end")
                images = app.screen.query_one(RecordTable)
                assert isinstance(images.current, Image) and images.current.id == "old"
                await goes(pilot, first)
                assert "young" in text(pilot) and "(Restore)" in text(pilot)
                await pilot.press("1")
                await until_shown(pilot, "✗ No phosd for", "5 of 6", "1 marked", "4.py")
                await pilot.press("3")
            async with served(bus, tmp_path, engine):
                await is_back(pilot)
                assert app.current_mode == "images"
                assert isinstance(images.current, Image) and images.current.id == "old"
                await until_shown(pilot, "r Restore")
                await pilot.press("1")
                await until_shown(pilot, "5 of 6", "1 marked")
                assert app.screen.query_one(Input).value == "eval"
                now = (processes.current, processes.chosen, processes.sort, processes.descending)
                assert now == state
                await pilot.press("escape")  # all rows, no marks
                await until_shown(pilot, "6 rows", "python tra")
                processes.move_to(next(p.path for p in node.of(Process).values() if p.pid == PID))
                await pilot.press("c")
                await until_told(pilot, f"checkpoint of {PID} is done", "image-0")

    run(body)


def test_the_page_of_a_process_stays_and_a_job_that_was_lost_is_told(
    bus: str, tmp_path: Path, engine: FakeEngine
) -> None:
    engine.go.clear()

    async def body() -> None:
        async with opened(Node(BusLink(bus)), LARGE) as pilot:
            async with served(bus, tmp_path, engine) as first:
                await until_shown(pilot, "6 rows", "python tra")
                await pilot.press("slash", *"train", "enter", "c")
                await until_shown(pilot, "■ quiesce")
                await pilot.press("enter")
                await until_shown(pilot, "periodic checkpoints", f"{PID} python train.py")
                await goes(pilot, first)
                assert f"{PID} python train.py" in text(pilot)
            engine.go.set()
            async with served(bus, tmp_path, engine):
                await is_back(pilot)
                await until_told(pilot, "Job 1 is interrupted", "in the history (4)")
                await until_shown(pilot, "periodic checkpoints", "state running")
                await until(pilot, lambda: "(it has ended)" not in text(pilot), "the new list")
                await pilot.press("q")
                await until_shown(pilot, "1 of 6", "running")
                assert "■ quiesce" not in text(pilot)
                await pilot.press("c")
                await until_told(pilot, f"Job 2: checkpoint of {PID} is done")

    run(body)


def test_it_may_come_and_go_again_and_again(bus: str, tmp_path: Path, engine: FakeEngine) -> None:
    async def body() -> None:
        async with opened(Node(BusLink(bus)), LARGE) as pilot:
            for _ in range(4):
                async with served(bus, tmp_path, engine) as service:
                    await is_back(pilot)
                    await until_shown(pilot, "6 rows", "python tra")
                    await goes(pilot, service)
            assert "train.py" in text(pilot)

    run(body)
