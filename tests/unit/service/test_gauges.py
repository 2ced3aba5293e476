"""What Prometheus is told of a node's programs, images and disk."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from phosd import __version__
from phosd.engine.image.manifest import CHUNK
from phosd.engine.operations.admission import SizeOrShare
from phosd.engine.program.away import Away
from phosd.errors import Busy, Internal, PhosError
from phosd.service.api import gauges
from phosd.service.api.gauges import Sources, register
from phosd.service.api.views import ImageView, ProcessView, image_path, process_path
from phosd.service.config import Config
from phosd.service.jobs.job import Job, JobState, Task
from phosd.service.jobs.limits import UserLimits
from tests.support.fake_engine import block, manifest, this_process

USER, OTHER = 1000, 1001
Told = Callable[..., float | None]


def image(name: str, age: float, in_memory: bool = False, **changes: Any) -> ImageView:
    """An image that was made some seconds ago."""
    made = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
    found = msgspec.structs.replace(manifest(name, **changes), created=made)
    return ImageView(found, in_memory=in_memory)


def program(pid: int, last: str = "", every: float = 0.0, **changes: Any) -> ProcessView:
    return ProcessView(this_process(pid=pid, **changes), last, (), every, 0)


def job(number: int, pid: int, state: JobState, error: PhosError | None = None) -> Job:
    task = Task("checkpoint", str(pid), 0, frozenset(), lambda _: None)  # type: ignore[arg-type, return-value]
    return Job(number, task, time.time(), state=state, error=error or Internal("x", hint="y"))


def told(
    programs: list[ProcessView],
    images: list[ImageView],
    jobs: tuple[Job, ...] = (),
    config: Config | None = None,
    troubles: tuple[str, ...] = (),
) -> Told:
    """Return a function that asks for a gauge by its name and labels."""
    inventory: Any = SimpleNamespace(
        processes={process_path(view.process): view.process for view in programs},
        views={process_path(view.process): view for view in programs},
        images={image_path(view.manifest.id): view for view in images},
    )
    table: Any = SimpleNamespace(waiting=0, running=0, snapshot=lambda: jobs)
    registry = CollectorRegistry()
    register(registry, Sources(table, inventory, lambda: config or Config(), lambda: [*troubles]))
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    return lambda name, **labels: samples.get((f"phosd_{name}", *sorted(labels.items())))


def test_programs_are_counted_by_their_protection() -> None:
    """Those of one name are one program, and all five words are told of always."""
    some = [
        program(1, "fresh", 60.0),
        program(2, "old", 60.0, name="two"),
        program(3, "", 60.0, name="two"),
        program(4, "old", unit="unit four.service"),
        program(5),
        program(6, "fresh", 60.0),
    ]
    images = [image("fresh", 10.0), image("old", 100.0)]
    asked = told(some, images, (job(1, 6, JobState.FAILED),), troubles=("a", "b"))
    for word in ("protected", "late", "saved", "never", "failed"):
        assert asked("programs", protection=word) == 1, word
    assert asked("most_overdue_seconds") == pytest.approx(40.0, abs=5.0)
    assert asked("programs_nobody_restarts") == 4
    assert asked("troubles") == 2
    assert asked("build_info", version=__version__) == 1
    none = told([], [])
    assert {none("programs", protection=word) for word in ("protected", "late", "failed")} == {0}
    assert none("most_overdue_seconds") == 0


def test_what_was_asked_for_in_vain_is_no_failure() -> None:
    """As `phos status` says of a checkpoint of a suspended program."""
    refused = job(1, 1, JobState.FAILED, Busy("it is suspended", hint="resume it"))
    asked = told([program(1, "old")], [image("old", 100.0)], (refused,))
    assert asked("programs", protection="failed") == 0
    assert asked("programs", protection="saved") == 1


def test_what_is_suspended_is_not_overdue() -> None:
    """No checkpoint of it is made, and it computes nothing."""
    asked = told([program(1, "old", 60.0, state="suspended")], [image("old", 100.0)])
    assert asked("programs", protection="late") == 1, "as `phos status` says"
    assert asked("most_overdue_seconds") == 0


def away(pid: int, name: str, where: str, ago: float, ran: float, last: str = "") -> ProcessView:
    """A program that was suspended some seconds ago, after it had run for a while."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME) - ago - ran
    return program(
        pid,
        last,
        state="suspended",
        start_time=int(began * os.sysconf("SC_CLK_TCK")),
        uid=USER,
        away=Away(name, where, 1000, time.time() - ago),
    )


@pytest.mark.parametrize(
    ("saved_ago", "in_memory", "unsaved"),
    [
        (None, False, 5000.0),
        (1060.0, False, 60.0),
        (1060.0, True, 5000.0),
        (900.0, False, 0.0),
        (9e6, False, 5000.0),
    ],
    ids=["never", "before", "in memory", "since", "and restored from it"],
)
def test_what_a_reboot_would_lose(saved_ago: float | None, in_memory: bool, unsaved: float) -> None:
    """A reboot loses what a suspended program did since its newest image on the disk, but no more
    than it has done at all.
    """
    images = [] if saved_ago is None else [image("i", saved_ago, in_memory=in_memory)]
    asked = told([away(70, "a", "memory", 1000.0, 5000.0, "i")], images)
    assert asked("suspended_unsaved_seconds") == pytest.approx(unsaved, abs=5.0)
    assert asked("images_in_memory") == in_memory


def test_suspended_programs_are_counted_once() -> None:
    some = [
        away(70, "a", "memory", 10.0, 50.0),
        away(71, "a", "memory", 10.0, 50.0),
        away(72, "b", "disk", 10.0, 80.0),
        program(73),
    ]
    some[1] = replace(some[1], process=replace(some[1].process, away=some[0].process.away))
    asked = told(some, [])
    assert asked("suspended_programs", where="memory") == 1
    assert asked("suspended_programs", where="disk") == 1
    assert asked("suspended_unsaved_seconds") == pytest.approx(80.0, abs=5.0)
    assert told([], [])("suspended_programs", where="disk") == 0


def test_a_quota_is_told_with_what_is_used_of_it() -> None:
    """Images and suspended programs count, as they do when a checkpoint is refused."""
    limits = (UserLimits(user=OTHER), UserLimits(user=7, quota=5), UserLimits(quota=10 * CHUNK))
    images = [image("i", 1.0, owner=USER, blocks=(block(1, 2),)), image("j", 1.0, owner=OTHER)]
    some = [away(70, "a", "memory", 1.0, 1.0)]
    asked = told(some, images, config=Config(limits=limits))
    assert asked("quota_bytes", user=str(USER)) == 10 * CHUNK
    assert asked("quota_used_bytes", user=str(USER)) == 2 * CHUNK + 1000
    assert asked("image_bytes", user=str(USER)) == 2 * CHUNK
    assert (asked("quota_bytes", user="7"), asked("quota_used_bytes", user="7")) == (5, 0)
    assert asked("quota_bytes", user=str(OTHER)) is None, "its first rule has none"


def test_bytes_follow_the_images() -> None:
    """They are not counted anew for each scrape."""
    inventory: Any = SimpleNamespace(views={}, images={"a": image("i", 1.0, blocks=(block(1),))})
    table: Any = SimpleNamespace()
    registry = CollectorRegistry()
    registry.register(gauges._Images(Sources(table, inventory, Config, list)))
    for chunks in (1, 1, 2, 2):
        if chunks == 2:
            inventory.images = {"b": image("j", 1.0, blocks=(block(2, 3),))}
        assert registry.get_sample_value("phosd_image_bytes", {"user": "0"}) == chunks * CHUNK
    inventory.images = {}
    assert registry.get_sample_value("phosd_image_bytes", {"user": "0"}) is None


def test_users_with_labels_of_their_own_are_few() -> None:
    """Those who have used most of their quota come first."""
    many = [image(f"i{n}", 1.0, owner=n, blocks=(block(*range(n % 9 + 1)),)) for n in range(1, 300)]
    asked = told([], many, config=Config(limits=(UserLimits(quota=CHUNK),)))
    for name in ("image_bytes", "quota_bytes", "quota_used_bytes"):
        users = [n for n in range(1, 300) if asked(name, user=str(n)) is not None]
        assert len(users) == 100, name
        assert {8, 17} <= {*users} and 1 not in users, name


def test_the_disk_is_looked_at_beside_scrapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "_DISK_SECONDS", 0.01)
    folder = tmp_path / "state"
    folder.mkdir()
    config = Config(state_dir=folder, min_free=SizeOrShare(share=0.5))
    sources = Sources(Any, SimpleNamespace(), lambda: config, list)  # type: ignore[arg-type]
    registry = CollectorRegistry()
    registry.register(gauges._Disk(sources))
    assert registry.get_sample_value("phosd_disk_bytes") is None, "nothing has been looked at"

    async def watch() -> None:
        watching = asyncio.create_task(sources.watch_disk())
        while sources.disk is None:
            await asyncio.sleep(0.01)
        total = registry.get_sample_value("phosd_disk_bytes")
        free = registry.get_sample_value("phosd_disk_free_bytes")
        assert total is not None and free is not None
        assert 0 < free <= total
        assert registry.get_sample_value("phosd_disk_kept_free_bytes") == int(total * 0.5)
        folder.rmdir()
        while sources.disk is not None:
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(watch())
    assert registry.get_sample_value("phosd_disk_free_bytes") is None, "it cannot be asked"
