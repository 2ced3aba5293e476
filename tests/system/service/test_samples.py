"""What the GPUs did lately."""

import dataclasses
import pwd
import time

import pytest

from phosd.bus import path_of
from phosd.engine.node.gpus import GpuInfo
from phosd.service.samples import PERIOD, Samples
from tests.support.fake_engine import GPU
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.system.service.test_object_methods import ask

STRANGER = pwd.getpwnam("nobody").pw_uid
PATH = path_of("gpu", GPU.uuid)


def test_the_latest_samples_of_each_gpu_are_kept() -> None:
    samples = Samples()
    other = dataclasses.replace(GPU, uuid="GPU-other", power=7.0)
    for number in range(700):
        samples.take([GPU, other] if number < 350 else [GPU], float(number))
    kept = samples.of(GPU.uuid)
    assert [sample.time for sample in kept] == [float(number) for number in range(400, 700)]
    assert len(kept) * PERIOD == 600
    assert samples.of(other.uuid) == [], "it is gone"
    samples.take([GPU, other], 700.0)
    assert [(sample.time, sample.power) for sample in samples.of(other.uuid)] == [(700.0, 7.0)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be asked for before the service: it looks more often."""
    monkeypatch.setattr("phosd.service.api.inventory.PERIOD", 0.05)


def test_samples_over_the_bus(quick: None, service: Service) -> None:
    begun = time.time() * 1e6 - 60e6
    service.call("ListGPUs")  # which puts it on the bus
    wait_until(lambda: len(ask(service.address, PATH, "Gpu1", "ListSamples")) > 3, "samples")
    found = ask(service.address, PATH, "Gpu1", "ListSamples", uid=STRANGER)
    assert {tuple(row[1:]) for row in found} == {(0.5, 1 << 20, 40.0, 100.0)}
    times = [row[0] for row in found]
    assert times == sorted(set(times))
    assert begun < times[0] <= times[-1] <= time.time() * 1e6
    later = ask(service.address, PATH, "Gpu1", "ListSamples", "since", "t", times[2])
    assert [row[0] for row in later][: len(times) - 2] == times[2:]
    with pytest.raises(RuntimeError, match="the options of this call are: since"):
        ask(service.address, PATH, "Gpu1", "ListSamples", "limit", "u", 1)


def test_a_gpu_that_does_not_tell_everything(quick: None, service: Service) -> None:
    service.engine.devices = [dataclasses.replace(GPU, temperature=None, utilisation=None)]
    unknown = [-1.0, 1 << 20, -1.0, 100.0]
    service.call("ListGPUs")

    def newest() -> list[list[float]]:
        return [row[1:] for row in ask(service.address, PATH, "Gpu1", "ListSamples")[-1:]]

    wait_until(lambda: newest() == [unknown], "the newest sample")


def test_a_gpu_without_nvml_says_so(quick: None, service: Service) -> None:
    service.engine.devices = [GpuInfo(0, "GPU-soft", "PHOS software GPU", 1 << 30)]
    path = path_of("gpu", "GPU-soft")
    wait_until(lambda: path in service.call("ListGPUs"), "the GPU")
    with pytest.raises(RuntimeError, match="there are no figures of PHOS software GPU: NVML does"):
        ask(service.address, path, "Gpu1", "ListSamples")


def test_many_who_ask_do_not_make_phosd_look_more_often(service: Service) -> None:
    """And so the properties of a GPU change every two seconds at most."""
    wait_until(lambda: service.engine.looks_at_gpus, "the first look")
    before, begun = service.engine.looks_at_gpus, time.monotonic()
    for _ in range(20):
        assert PATH in service.call("ListGPUs")
    looks = service.engine.looks_at_gpus - before
    assert looks <= 1 + (time.monotonic() - begun) / (0.99 * PERIOD)


def test_phosd_looks_by_itself(quick: None, service: Service) -> None:
    before = service.engine.looks_at_gpus
    wait_until(lambda: service.engine.looks_at_gpus > before + 3, "looks")
