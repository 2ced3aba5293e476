"""Images, history and log of phos-tui over a real manager on a real bus."""

import asyncio
import csv
import os
from pathlib import Path

from textual.widgets import Input

from phosd.client.records import Image
from phosd.errors import Busy
from phosd.tui.link import BusLink
from phosd.tui.node import Node
from tests.support.fake_engine import block, manifest, this_process
from tests.support.service import Service
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import text


async def looked_again(service: Service) -> None:
    """Make the service look which images there are."""
    await asyncio.to_thread(service.call, "ListImages")


def test_images_are_verified_restored_looked_into_and_deleted(service: Service) -> None:
    service.engine.stored = {
        "old": manifest("old", pid=7, blocks=(block(1, 2),)),
        "young": manifest("young", pid=8, why="it is hooked"),
    }

    async def body() -> None:
        node = Node(BusLink(service.address))
        async with opened(node, LARGE) as pilot:
            await looked_again(service)
            await pilot.press("3")
            await until_shown(pilot, "old", "young", "train --secret", "never")
            await pilot.press("home", "v")
            await until_told(pilot, "verify of young is done")
            await until_shown(pilot, "✓ ")
            await pilot.press("end", "r")
            await until_told(pilot, "restore of old is done", "4711")
            await pilot.press("enter")
            await until_shown(pilot, "old of 7 train --secret", "it stands alone", " 2 ")
            await until(pilot, lambda: "asked, and waiting" not in text(pilot), "its content")
            await pilot.press("d")
            await until_shown(pilot, "Delete image old of 7")
            await pilot.press("y")
            await until_told(pilot, "Delete old", "it is deleted")
            await until_shown(pilot, "(it is deleted)")
            assert list(service.engine.stored) == ["young"]
            await pilot.press("q")
            await until(pilot, lambda: len(node.of(Image)) == 1, "it to be gone")

    run(body)


def test_an_image_that_vanishes_under_the_question(service: Service) -> None:
    service.engine.stored = {"old": manifest("old"), "young": manifest("young")}

    async def body() -> None:
        async with opened(Node(BusLink(service.address)), LARGE) as pilot:
            await looked_again(service)
            await pilot.press("3")
            await until_shown(pilot, "young")
            await pilot.press("home", "d")
            await until_shown(pilot, "Delete image young")
            service.engine.stored.pop("young")
            await looked_again(service)
            await until_shown(pilot, "It is not there any more.")
            await pilot.press("y", "escape")
            await until_shown(pilot, "old")
            assert list(service.engine.stored) == ["old"]

    run(body)


def test_history_and_log_tell_what_was_done(service: Service, tmp_path: Path) -> None:
    service.engine.running = [this_process()]
    service.engine.go.set()
    path = tmp_path / "past.csv"

    def fails(progress: object) -> None:
        raise Busy("another debugger holds it", hint="end that")

    async def body() -> None:
        async with opened(Node(BusLink(service.address)), LARGE) as pilot:
            await until_shown(pilot, "running", "python train.py")
            await pilot.press("c")
            await until_told(pilot, "is done", "image-0")
            service.engine.act = fails
            await pilot.press("c")
            await until_told(pilot, "has failed", "end that")
            await pilot.press("4")
            await until_shown(pilot, "✓ done", "✗ failed", "image-0", "end that")
            await pilot.press("end", "enter")
            await until_shown(pilot, "Job 1: checkpoint of", "publish", "the program stood still")
            await pilot.press("q", "f")
            await until_shown(pilot, "Which jobs")
            pilot.app.screen.query_one("#pid", Input).value = str(os.getpid())
            pilot.app.screen.query_one("#state").value = "failed"  # type: ignore[attr-defined]
            pilot.app.screen.query_one("#pid", Input).focus()
            await pilot.press("enter")
            await until(pilot, lambda: "✓ done" not in text(pilot), "the filter")
            await until_shown(pilot, "✗ failed", f"pid {os.getpid()}, state failed")
            await pilot.press("w")
            await until_shown(pilot, "Export the jobs")
            pilot.app.screen.query_one("#file", Input).value = str(path)
            pilot.app.screen.query_one("#file", Input).focus()
            await pilot.press("enter")
            await until_told(pilot, "Export", "1 jobs are in")
            await pilot.press("6")
            await until_shown(pilot, "! warning", "failed", "· info", "job 1", "job 2")

    run(body)
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["state"], row["error"], row["target"]) == ("failed", "Busy", str(os.getpid()))


def test_a_gpu_has_its_figures_of_before(service: Service) -> None:
    service.engine.running = [this_process()]

    async def body() -> None:
        async with opened(Node(BusLink(service.address)), LARGE) as pilot:
            await pilot.press("5")
            await until_shown(pilot, "GPU 0: A test's GPU", "Load: 50%", "Temperature: 40 °C")
            await until_shown(pilot, "Power: 100 W", "Memory: 1.0 MiB", "python train.py")

    run(body)
