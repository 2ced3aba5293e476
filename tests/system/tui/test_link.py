"""The way to phosd: a real manager on a real bus, its signals, its absence."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from phosd.bus import Call, Variant
from phosd.client.errors import CommandError
from phosd.client.records import Gpu, Image, Job, Process
from phosd.service.dbus.call_queue import CallQueue
from phosd.tui.link import BusLink
from phosd.tui.node import Contact, Node, Noted
from tests.support.bus import busctl, private_bus, start_bus
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import PATIENCE, running, wait_until
from tests.support.service import Service
from tests.support.tui.opened import run


async def come_true(condition: Callable[[], object], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while not condition():
        assert loop.time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def mirrored(where: str) -> AsyncIterator[Node]:
    node = Node(BusLink(where))
    node.start()
    try:
        yield node
    finally:
        node.stop()


async def is_here(node: Node) -> None:
    await come_true(lambda: node.contact is Contact.HERE, "phosd")


def test_what_is_there_and_what_comes_and_goes_is_mirrored(service: Service) -> None:
    service.engine.running = [this_process()]
    service.engine.stored["old"] = manifest("old")

    async def body() -> None:
        async with mirrored(service.address) as node:
            await is_here(node)
            assert "checkpoint" in node.manager.features
            await come_true(lambda: node.gpus, "the GPU")
            assert [gpu.name for gpu in node.gpus] == ["A test's GPU"]
            await come_true(lambda: node.process(os.getpid()), "the process")
            process = node.process(os.getpid())
            assert process is not None
            assert (process.user_name, process.command) == ("root", ("python", "train.py"))
            service.engine.running = [this_process(device_bytes=8192, state="locked")]
            await come_true(
                lambda: [p.state for p in node.of(Process).values()] == ["locked"], "the change"
            )
            service.engine.running = []
            await come_true(lambda: not node.of(Process), "its end")
            assert all(isinstance(gpu, Gpu) for gpu in node.gpus)

    run(body)


def test_a_job_is_followed_to_its_end_with_what_is_private(service: Service) -> None:
    service.engine.running = [this_process()]
    kinds: set[type] = set()

    async def body() -> None:
        async with mirrored(service.address) as node:
            node.subscribe(kinds.update)
            await is_here(node)
            await come_true(lambda: node.process(os.getpid()), "the process")
            path = await node.call("Checkpoint", os.getpid())
            await come_true(lambda: path in node.of(Job), "the job")
            await come_true(lambda: node.job_of(str(os.getpid())), "the job by its target")
            await come_true(lambda: node.of(Job)[path].stopped, "the stop")
            service.engine.go.set()
            await come_true(lambda: node.of(Job)[path].over, "the end")
            job = node.of(Job)[path]
            await come_true(lambda: node.of(Job)[path].result, "the result, which is private")
            assert (job.state, job.target) == ("done", str(os.getpid()))
            assert [phase.name for phase in job.phases] == ["prepare", "quiesce", "publish"]
            await come_true(lambda: node.image(node.of(Job)[path].result), "the image")
            image = node.image(node.of(Job)[path].result)
            assert image is not None and image.command == ("train", "--secret")
            assert node.job_of(str(os.getpid())) is None
            await come_true(lambda: Noted in kinds, "the event")
            await node.call("DeleteImage", image.id)
            await come_true(lambda: not node.of(Image), "the image to go")

    run(body)


def test_an_error_says_what_to_do_next(service: Service) -> None:
    async def body() -> None:
        async with mirrored(service.address) as node:
            await is_here(node)
            with pytest.raises(CommandError, match="phos images") as caught:
                await node.call("Restore", "no-such-image")
            assert caught.value.code == "NoSuchImage"
            assert node.waiting is None

    run(body)


def test_a_signal_of_somebody_else_is_not_believed(service: Service) -> None:
    """The bus lets anybody send a signal to one connection; only its sender is certain."""
    service.engine.running = [this_process()]

    async def body() -> None:
        link = BusLink(service.address)
        node = Node(link)
        node.start()
        try:
            await is_here(node)
            await come_true(lambda: node.process(os.getpid()), "the process")
            path = next(iter(node.of(Process)))
            hooks: set[str] = set()
            node.subscribe(lambda _: hooks.add(node.of(Process)[path].hook))
            assert link._session is not None
            await asyncio.sleep(0.3)  # what it is told of now is told on
            to = f"--destination={link._session.connection._bus.unique_name}"
            lie = ("org.freedesktop.DBus.Properties", "PropertiesChanged", "sa{sv}as")
            values = ("org.phos.Process1", "1", "HookState", "s", "lie", "0")
            await asyncio.to_thread(busctl, service.address, "emit", to, path, *lie, *values)
            await asyncio.sleep(0.3)  # it would be told within a batch
            service.engine.running = [this_process(state="locked")]  # it is told after the lie
            await come_true(lambda: node.of(Process)[path].state == "locked", "the truth")
            assert hooks == {"hooked"}
        finally:
            node.stop()

    run(body)


def test_without_a_daemon_it_waits_and_says_how_to_start_it(tmp_path: Path) -> None:
    async def body() -> None:
        with private_bus(tmp_path) as address:
            async with mirrored(address) as node:
                await come_true(lambda: node.contact is Contact.GONE, "the news")
                assert "phosd --session" in node.trouble
                with pytest.raises(CommandError, match="phosd --session"):
                    await node.call("Checkpoint", 1)

    run(body)


def test_without_a_bus_it_tries_again_until_there_is_one(tmp_path: Path) -> None:
    async def body() -> None:
        async with mirrored(f"unix:path={tmp_path / 'bus'}") as node:
            await come_true(lambda: node.contact is Contact.GONE, "the news")
            assert "no D-Bus at" in node.trouble and "dbus-run-session" in node.trouble
            with pytest.raises(CommandError, match="try again"):
                await node.call("Checkpoint", 1)
            daemon, _ = start_bus(tmp_path)
            try:
                await come_true(lambda: "phosd does not run" in node.trouble, "the bus")
            finally:
                daemon.kill()
                daemon.wait()
            await come_true(lambda: "the bus went away" in node.trouble, "the end of the bus")

    run(body)


def test_what_was_known_stays_when_the_daemon_goes(service: Service) -> None:
    service.engine.running = [this_process()]

    async def body() -> None:
        async with mirrored(service.address) as node:
            await is_here(node)
            await come_true(lambda: node.process(os.getpid()), "the process")
            service.disconnect()
            await come_true(lambda: node.contact is Contact.GONE, "the news")
            assert node.process(os.getpid()) is not None
            assert "phosd --session" in node.trouble

    run(body)


def test_many_objects_at_once_are_read_in_one_call(service: Service) -> None:
    async def body() -> None:
        async with mirrored(service.address) as node:
            await is_here(node)
            first = this_process()
            service.engine.running = [replace(first, start_time=n) for n in range(1, 101)]
            await come_true(lambda: len(node.of(Process)) == 100, "all of them")
            assert {p.command for p in node.of(Process).values()} == {("python", "train.py")}
            assert node.contact is Contact.HERE

    run(body)


def test_what_is_new_is_told_when_it_is_read_and_not_before(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals name neither command nor owner; and a process may be somebody else's."""
    take = CallQueue.take
    held: list[tuple[CallQueue, Call]] = []
    told: list[Process] = []

    def hold(queue: CallQueue, call: Call) -> None:
        if call.member == "GetAll" and "/process/" in call.path:
            held.append((queue, call))
        else:
            take(queue, call)

    monkeypatch.setattr(CallQueue, "take", hold)

    async def body() -> None:
        async with mirrored(service.address) as node:
            await is_here(node)
            node.subscribe(lambda _: told.extend(node.of(Process).values()))
            service.engine.running = [this_process()]
            await come_true(lambda: held, "the question")
            service.engine.running = [this_process(state="locked")]
            where = "ListProcesses"
            await asyncio.to_thread(wait_until, lambda: "locked" in service.call(where), "a signal")
            await asyncio.sleep(0.3)  # it would be told within a batch
            assert told == []
            service.loop.call_soon_threadsafe(take, *held[0])
            await come_true(lambda: told, "the process")
            assert (told[0].command, told[0].state) == (("python", "train.py"), "locked")

    run(body)


def test_a_flood_of_signals_is_told_at_most_ten_times_a_second(service: Service) -> None:
    service.engine.running = [this_process()]
    flood = 100

    def change(path: str, number: int) -> None:
        changed = {"DeviceBytes": Variant("t", number)}
        interface = "org.freedesktop.DBus.Properties"
        values: tuple[object, ...] = ("org.phos.Process1", changed, [])
        service.connections[0].emit(path, interface, "PropertiesChanged", "sa{sv}as", *values)

    async def body() -> None:
        async with mirrored(service.address) as node:
            await is_here(node)
            await come_true(lambda: node.process(os.getpid()), "the process")
            path = next(iter(node.of(Process)))
            told: list[frozenset[type]] = []
            node.subscribe(told.append)
            began = time.monotonic()
            for number in range(1, flood + 1):
                service.loop.call_soon_threadsafe(change, path, number)
                await asyncio.sleep(0.01)
            await come_true(lambda: node.of(Process)[path].device_bytes == flood, "the last one")
            seconds = time.monotonic() - began
            assert sum(Process in kinds for kinds in told) <= 10 * seconds + 2

    run(body)


_AS_SOMEBODY = """
import asyncio, os, sys
from phosd.tui.link import BusLink
from phosd.tui.node import Contact, Node
from phosd.client.records import Process

os.setgroups([]); os.setgid(65534); os.setuid(65534)

async def body():
    node = Node(BusLink(sys.argv[1]))
    node.start()
    while node.contact is not Contact.HERE:
        await asyncio.sleep(0.02)
    print("ready", flush=True)
    while not any(p.state == "locked" for p in node.of(Process).values()):
        await asyncio.sleep(0.02)
    print(sorted(p.user for p in node.of(Process).values()), flush=True)
    node.stop()

asyncio.run(body())
"""


def test_others_things_do_not_appear(service: Service) -> None:
    """Signals tell everybody of everything; what lists leave out must not come in by them."""
    child = [sys.executable, "-c", _AS_SOMEBODY, service.address]
    with running(child, stdout=subprocess.PIPE) as somebody:
        assert somebody.stdout is not None
        assert somebody.stdout.readline() == "ready\n"
        theirs = this_process(start_time=2, uid=65534)
        others = this_process(start_time=3, state="locked")
        service.engine.running = [others, theirs]
        there = f"_{others.pid}_3"
        wait_until(lambda: there in service.call("ListProcesses"), "the service")
        service.engine.running = [replace(others, device_bytes=1), replace(theirs, state="locked")]
        assert somebody.stdout.readline() == "[65534]\n"
