"""Images in memory are written to the disk beside the jobs, and all can see which are not yet."""

import os
from pathlib import Path

import pytest

from phosd.bus import path_of
from phosd.errors import OutOfSpace
from phosd.service.api import durability
from phosd.service.config import Config
from tests.support.fake_engine import FakeEngine
from tests.support.harness import wait_until
from tests.support.service import ROOT, Service, serving
from tests.system.service.test_jobs import wait_for


def state(service: Service, image: str) -> str:
    return service.get(path_of("image", image), "Image1", "State")


def troubles(service: Service) -> str:
    return service.get(ROOT, "Manager1", "Troubles")


def test_an_image_is_in_memory_until_it_is_written(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "_AFTER_TROUBLE_SECONDS", 0.1)
    engine = service.engine
    engine.go.set()
    engine.disk_trouble = OutOfSpace("the disk is full", hint="make room")
    engine.unwritten = ["image-deleted", "image-0"]
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    assert state(service, "image-0") == '"in memory"'
    wait_until(lambda: "in memory only: the disk is full" in troubles(service), "the trouble")
    assert engine.unwritten == ["image-deleted", "image-0"]
    engine.disk_trouble = None
    wait_until(lambda: state(service, "image-0") == '"durable"', "the image to be durable")
    wait_until(lambda: troubles(service) == "0", "the end of the trouble")
    assert engine.unwritten == ["image-deleted"], "who is gone keeps nobody else"


def test_an_image_on_the_disk_is_durable(service: Service) -> None:
    service.engine.go.set()
    options = ("durable", "b", "true")
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 1, *options), "done")
    assert state(service, "image-0") == '"durable"'
    (request,) = service.engine.requests
    assert getattr(request, "durable", False)


def test_what_is_in_memory_is_written_when_phosd_stops(
    bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "_LOOK_SECONDS", 3600.0)
    config = Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run")
    config.runtime_dir.mkdir()
    engine = FakeEngine()
    engine.go.set()
    with serving(bus, config, engine) as service:
        wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
        engine.unwritten = ["image-deleted", "image-0"]
    assert engine.unwritten == ["image-deleted"]


def test_whatever_goes_wrong_it_is_tried_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "_AFTER_TROUBLE_SECONDS", 0.1)
    engine = service.engine
    engine.go.set()

    def broken() -> list[str]:
        raise KeyError("nobody expects this")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "in_memory", broken)
        wait_until(lambda: "nobody expects this" in troubles(service), "the trouble")
    engine.unwritten = ["image-0"]
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    wait_until(lambda: state(service, "image-0") == '"durable"', "the image to be durable")
