"""``phos status`` says what needs somebody, and so does its exit code."""

import dataclasses
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from phosd.engine.image.manifest import Manifest
from phosd.engine.system.procfs import process_id
from phosd.errors import Internal, OutOfMemory, OutOfSpace
from phosd.service.jobs.table import Job, JobState, Outcome, Task
from tests.support import fake_engine
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.system.cli.test_client import lines, phos
from tests.system.cli.test_lists import as_nobody

ME = str(os.getpid())


@pytest.fixture
def node(service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Images that are made there are of now."""

    def of_now(*names: str, **about: Any) -> Manifest:
        return replace(manifest(*names, **about), created=datetime.now(UTC).isoformat())

    monkeypatch.setattr(fake_engine, "manifest", of_now)
    found = process_id(os.getpid())
    assert found is not None
    service.engine.running = [this_process(start_time=found.start_time)]
    service.engine.go.set()
    return service


def protection(node: Service) -> tuple[object, object, int]:
    done = phos(node, "status", "--json")
    (row,) = lines(done.stdout)
    return row["protection"], row["trouble"], done.returncode


def test_a_program_from_its_first_checkpoint_on(node: Service) -> None:
    assert protection(node) == ("never", None, 1)
    assert phos(node, "checkpoint", ME).returncode == 0
    assert protection(node) == ("saved", None, 0)
    assert phos(node, "checkpoint", ME, "--every", "1h").returncode == 0
    assert protection(node) == ("protected", None, 0)
    shown = phos(node, "status").stdout
    assert "1: 1 protected" in shown and "\N{BLACK CIRCLE} protected" in shown
    assert "in 59 min" in shown or "in 1 h" in shown
    assert "by hand" in shown and "free, images take" in shown

    def full(_: object) -> None:
        raise OutOfSpace("the disk is full", hint="make room")

    node.engine.act = full
    assert phos(node, "checkpoint", ME).returncode != 0
    state, trouble, code = protection(node)
    assert (state, code) == ("failed", 1)
    assert str(trouble).startswith("checkpoint: the disk is full")


def test_a_pool_that_cannot_be_filled_needs_somebody(node: Service) -> None:
    node.engine.stored["i"] = replace(manifest("i"), created=datetime.now(UTC).isoformat())
    assert phos(node, "checkpoint", ME).returncode == 0
    assert protection(node) == ("saved", None, 0)

    def full(_: object) -> None:
        raise OutOfMemory("GPU 0 has 1 GiB free", hint="end something")

    node.engine.act = full
    assert phos(node, "pool", "create", "chat", "i").returncode == 0
    wait_until(lambda: "GPU 0 has" in phos(node, "pool").stdout, "the trouble")
    shown = phos(node, "status")
    assert shown.returncode == 1
    said = " ".join(shown.stdout.split())
    assert "1 pool, 0 programs waiting; chat cannot be filled: GPU 0 has 1 GiB free" in said
    assert phos(node, "pool", "rm", "chat").returncode == 0
    assert protection(node) == ("saved", None, 0)


def test_a_program_has_ended_after_its_last_periodic_checkpoint(node: Service) -> None:
    assert phos(node, "checkpoint", ME, "--every", "1h").returncode == 0
    node.engine.running = []
    node.call("ListProcesses")
    assert protection(node) == ("ended", None, 0)
    shown = phos(node, "status").stdout
    assert "0: 1 ended" in shown and "\N{WHITE SQUARE} ended" in shown
    (image,) = lines(phos(node, "images", "--json").stdout)
    assert f"phos restore {image['id']}" in shown.replace("\n", " ")


def test_one_that_ended_before_phosd_began_is_told(node: Service) -> None:
    """As after a crash of the node: only the history knows that a schedule had saved it."""
    now = datetime.now(UTC)
    created = (now - timedelta(minutes=5)).isoformat()
    image = replace(manifest("old"), created=created, name="bert", number=1)
    node.engine.running = []
    node.engine.stored["old"] = image
    task = Task("checkpoint", "7", 0, frozenset(), lambda _: Outcome(), scheduled=True)
    job = Job(900, task, now.timestamp() - 300.0, ended=now.timestamp() - 299.0)
    job.state, job.outcome = JobState.DONE, Outcome("old")
    node.history.job(job)
    node.call("ListProcesses")
    node.call("ListImages")
    assert protection(node) == ("ended", None, 0)
    assert "bert" in phos(node, "status").stdout


def test_the_programs_are_told_when_the_images_cannot_be_reached(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert phos(node, "checkpoint", ME).returncode == 0

    def away() -> list[Manifest]:
        raise Internal("the images in /srv cannot be reached", hint="bring the disk back")

    monkeypatch.setattr(node.engine, "images", away)
    done = phos(node, "status")
    assert done.returncode == 1 and "1: 1 saved" in done.stdout, done.stdout
    assert "the images in /srv cannot be reached; bring the disk back; what is" in done.stderr


def test_who_restarts_it(node: Service) -> None:
    (running,) = node.engine.running
    node.engine.running = [dataclasses.replace(running, unit="unit bert.service")]
    node.call("ListProcesses")
    for command in ("status", "ps"):
        (row,) = lines(phos(node, command, "--json").stdout)
        assert row["restarter"] == "unit bert.service"
    assert "by unit bert.service" in phos(node, "status").stdout


def test_programs_of_others_are_not_judged(node: Service) -> None:
    """What has been saved of them is not told to everybody."""
    done = as_nobody(node, "status")
    assert done.returncode == 0 and "none" in done.stdout, done.stderr


def test_a_node_without_programs(service: Service) -> None:
    service.engine.running = []
    done = phos(service, "status")
    assert done.returncode == 0 and "no process" in done.stderr
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line)
    assert told["programs"] == "none" and "free" in told["disk"]
