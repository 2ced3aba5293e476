"""phos-tui over a real manager on a real bus: the keys do what they say."""

import os

from phosd.client.records import Job
from phosd.engine.program.process import GpuProcess
from phosd.service.process_identity import identify
from phosd.tui.link import BusLink
from phosd.tui.node import Node
from tests.support.fake_engine import this_process
from tests.support.service import Service
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told

PID = os.getpid()


def this_one() -> GpuProcess:
    """This very process, by which its schedule is known."""
    return this_process(start_time=identify(PID).start_time)


def test_checkpoint_is_watched_to_its_end(service: Service) -> None:
    service.engine.running = [this_one()]

    async def body() -> None:
        async with opened(Node(BusLink(service.address)), LARGE) as pilot:
            await until_shown(pilot, str(PID), "python train.py", "A test's GPU")
            await pilot.press("c")
            await until_shown(pilot, "■ quiesce", f"checkpoint {PID}")
            service.engine.go.set()
            await until_told(pilot, f"checkpoint of {PID} is done", "image-0")
            await pilot.press("2")
            await until_shown(pilot, "✓ done", "image-0")
            await pilot.press("enter")
            await until_shown(pilot, "prepare", "quiesce", "publish", "the program stood still")

    run(body)


def test_a_schedule_with_options_that_is_ended(service: Service) -> None:
    service.engine.running = [this_one()]
    service.engine.go.set()

    async def body() -> None:
        async with opened(Node(BusLink(service.address)), LARGE) as pilot:
            await until_shown(pilot, str(PID))
            await pilot.press("A")
            await until_shown(pilot, "How often")
            pilot.app.screen.query_one("#mode").value = "driver"  # type: ignore[attr-defined]
            pilot.app.screen.query_one("#every").value = "1h"  # type: ignore[attr-defined]
            await pilot.click("#go")
            await until_told(pilot, "is done")
            await until_shown(pilot, "every 1 h, late", "5 kept")
            (request,) = service.engine.requests
            assert request.mode == "driver"  # type: ignore[attr-defined]
            await pilot.press("A")
            await until_shown(pilot, "How often")
            pilot.app.screen.query_one("#every").value = "never"  # type: ignore[attr-defined]
            await pilot.click("#go")
            await until_told(pilot, f"Checkpoint of {PID}", "no periodic checkpoints any more")

    run(body)


def test_cancel(service: Service) -> None:
    service.engine.running = [this_one()]

    async def body() -> None:
        async with opened(Node(BusLink(service.address)), LARGE) as pilot:
            await until_shown(pilot, str(PID))
            await pilot.press("c")
            await until_shown(pilot, "■ quiesce")
            await pilot.press("2", "x")
            await until_told(pilot, f"checkpoint of {PID} is cancelled")
            await until_shown(pilot, "- cancelled")

    run(body)


def test_an_error_of_the_service_has_its_next_step(service: Service) -> None:
    service.engine.running = [this_one()]

    async def body() -> None:
        async with opened(Node(BusLink(service.address))) as pilot:
            await until_shown(pilot, str(PID))
            await pilot.press("c")
            await until_shown(pilot, "■ quiesce")
            await pilot.press("c")
            await until_told(pilot, f"Checkpoint of {PID}: Busy", "wait until it has ended")
            service.engine.go.set()

    run(body)


def test_the_daemon_goes_in_the_middle_and_what_was_seen_stays(service: Service) -> None:
    service.engine.running = [this_one()]

    async def body() -> None:
        node = Node(BusLink(service.address))
        async with opened(node, LARGE) as pilot:
            await until_shown(pilot, str(PID))
            await pilot.press("c")
            await until(pilot, lambda: node.of(Job), "the job")
            service.disconnect()
            await until_shown(pilot, "No phosd for", "phosd --session", str(PID), "(Checkpoint)")

    run(body)
