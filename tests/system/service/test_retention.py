"""Which images go by themselves, and which stay whatever the configuration says."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from phosd.engine.criu.files.file_orders import Version
from phosd.engine.image.manifest import CHUNK, Manifest
from phosd.engine.system.procfs import boot_id
from phosd.errors import Busy, ImageCorrupt, Timeout, Unsupported
from phosd.service.config import Config
from phosd.service.history.history import History
from phosd.service.jobs.limits import UserLimits
from phosd.service.process_identity import identify, key_of, process_key
from phosd.service.tasks.local_engine import NodeEngine
from phosd.service.tasks.retention import Retention, due, last_good, left_alone, old
from tests.support.fake_engine import FakeEngine, block, manifest
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.system.service.test_jobs import wait_for

DAY = 86_400.0
NOW = 1000 * DAY


def image(name: str, *packs: int, days_old: float = 0.0, owner: int = 7) -> Manifest:
    created = datetime.fromtimestamp(NOW - days_old * DAY, UTC).isoformat()
    return msgspec.structs.replace(
        manifest(name, owner=owner, blocks=(block(*packs),) if packs else ()), created=created
    )


FOUR = [image(name, days_old=days) for name, days in (("a", 9), ("b", 6), ("c", 3), ("d", 1))]


@pytest.mark.parametrize(
    ("limits", "kept", "damaged", "gone"),
    [
        (UserLimits(), (), (), ""),
        (UserLimits(quota=1), (), (), ""),
        (UserLimits(keep=4), (), (), ""),
        (UserLimits(keep=2), (), (), "ab"),
        (UserLimits(keep=2), ("a",), (), "b"),
        (UserLimits(keep=2), (), ("c", "b"), ""),
        (UserLimits(keep=1), (), ("d",), "ab"),
        (UserLimits(keep_days=5), (), (), "ab"),
        (UserLimits(keep_days=0.5), ("d",), (), "abc"),
        (UserLimits(keep=3, keep_days=5), (), (), "ab"),
        (UserLimits(keep=1, keep_days=5), (), (), "abc"),
    ],
)
def test_what_is_due(
    limits: UserLimits, kept: Collection[str], damaged: Collection[str], gone: str
) -> None:
    reasons = due(FOUR, limits, kept, damaged, NOW)
    assert "".join(reasons) == gone
    assert all(reasons.values())


def test_what_a_program_was_ended_with_waits_for_its_restore() -> None:
    """Nothing else is left of it; only its age counts."""
    ended = [msgspec.structs.replace(each, ended=each.id in "ab", name="") for each in FOUR]
    assert left_alone(ended, (), {}) == {"a", "b"}
    assert left_alone(ended, {"b"}, {"boot/7/1": "a"}) == set()
    waiting = left_alone(ended, (), {})
    assert "".join(due(ended, UserLimits(keep=1), (), (), NOW, waiting)) == "c"
    assert "".join(due(ended, UserLimits(keep=1, keep_days=8), (), (), NOW, waiting)) == "ac"
    large = [image(name, 1) for name in "abc"]
    limits = UserLimits(keep_bytes=0)
    assert "".join(due(large, limits, (), (), NOW, {"a"})) == "bc"


def test_programs_that_were_ended_survive_those_that_end_after_them(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    engine = FakeEngine()
    for name in "abc":
        engine.stored[name] = msgspec.structs.replace(image(name), ended=name != "c")
    rules = (UserLimits(keep=1),)
    assert Retention(engine, history).enforce(rules, ()) == 0
    history.restored["boot/7/1"] = "a"  # it has ended since
    assert Retention(engine, history).enforce(rules, ()) == 1
    assert set(engine.stored) == {"b", "c"}
    assert Retention(engine, history).enforce((UserLimits(keep=1, keep_last=False),), ()) == 1
    assert set(engine.stored) == {"c"}
    history.close()


def test_so_many_are_kept_of_each_program_that_has_a_name() -> None:
    names = ["x", "y", "x", "", "y", "x", ""]
    images = [
        msgspec.structs.replace(image(id), name=name)
        for id, name in zip("abcdefg", names, strict=True)
    ]
    assert "".join(due(images, UserLimits(keep_each=1), (), (), NOW)) == "abc"
    reasons = due(images, UserLimits(keep_each=1), ("a",), ("f",), NOW)
    assert reasons == {"b": "1 newer one of y is kept (keep_each)"}
    assert "".join(due(images, UserLimits(keep_each=2), (), (), NOW)) == "a"


@pytest.mark.parametrize(
    ("chunks", "kept", "gone"),
    [
        (4, (), ""),
        (3, (), "ab"),  # without the first alone nothing is free: the second shares its pack
        (2, (), "ab"),
        (1, (), "abc"),
        (1, ("c",), "abd"),
        (1, ("a", "c"), "bd"),
    ],
)
def test_the_oldest_go_until_the_rest_fits(chunks: int, kept: Sequence[str], gone: str) -> None:
    images = [image("a", 1, 2), image("b", 1, 2), image("c", 3), image("d", 4)]
    reasons = due(images, UserLimits(keep_bytes=chunks * CHUNK), kept, (), NOW)
    assert "".join(reasons) == gone


def test_the_reason_says_which_limit_it_was() -> None:
    limits = UserLimits(keep=2, keep_days=7, keep_bytes=CHUNK)
    images = [*FOUR[:2], image("c", 1), image("d", 2)]
    assert due(images, limits, (), (), NOW) == {
        "a": "it is 9.0 days old, 7 are kept (keep_days)",
        "b": "2 newer ones are kept (keep)",
        "c": "images take 4.0 MiB, 2.0 MiB are kept (keep_bytes)",
    }


def of_process(name: str, pid: int, start_time: int, boot: str | None = None) -> Manifest:
    return manifest(name, pid=pid, start_time=start_time, boot=boot or boot_id())


def test_the_last_good_image_of_a_process_that_runs() -> None:
    me, start = os.getpid(), identify(os.getpid()).start_time
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        images = [
            of_process("a", me, start),
            of_process("b", me, start),
            of_process("c", me, start),  # found damaged
            of_process("d", me, start - 1),  # had the pid before
            of_process("e", me, start, "another boot"),
            of_process("f", other.pid, identify(other.pid).start_time),
        ]
        assert last_good(images, {"c"}, {}) == {"b", "f"}
        other.communicate(b"\n")
    assert last_good(images, {"c"}, {}) == {"b"}


def test_a_restored_process_has_the_image_that_it_was_restored_from() -> None:
    """Until there is one of it: what it was saved as before is another process."""
    me = os.getpid()
    restored = {key_of(me): "a", process_key(boot_id(), me, 1): "b"}
    before = [of_process(name, me, start) for start, name in enumerate("abc")]
    assert last_good(before, (), restored) == {"a"}
    assert last_good(before, {"a"}, restored) == set()
    now = [*before, of_process("d", me, identify(me).start_time)]
    assert last_good(now, (), restored) == {"d"}


def test_the_images_of_a_name_are_of_one_program() -> None:
    """Each restored process is another one, with another start time."""
    lives = [of_process(name, 5, start) for start, name in enumerate("abc")]
    assert old(lives, math.inf, 1, (), ()) == []
    named = [msgspec.structs.replace(life, name="bert") for life in lives]
    assert old(named, math.inf, 1, (), ()) == ["a", "b"]
    assert old(named, math.inf, 1, (), {"c"}) == ["a"]


class Reading(FakeEngine):
    """One of the images is being read."""

    def delete_image(self, image: str) -> None:
        if image == "a":
            raise Busy("image a is being read by a job", hint="wait")
        super().delete_image(image)


class Silent(FakeEngine):
    """The users' file systems do not answer."""

    def left_files(self, uid: int, before: float, used: Collection[str]) -> list[Version]:
        raise Timeout("their file system does not answer", hint="wait")


def test_every_deletion_is_an_event_with_its_reason(tmp_path: Path) -> None:
    engine = Reading(stored={m.id: m for m in [*FOUR, image("e", owner=8), image("f", owner=9)]})
    history = History(tmp_path / "history.db")
    retention = Retention(engine, history)
    rules = (UserLimits(user=8), UserLimits(user=7, keep=1), UserLimits(keep_days=1))
    assert retention.enforce(rules, in_use={"b"}) == 1 + 1
    assert sorted(engine.stored) == ["a", "b", "d", "e"]
    history.flush()
    events = history.query("select kind, subject, text from events order by id")
    assert [(e["kind"], e["subject"]) for e in events] == [
        ("image-deleted", "c"),
        ("image-deleted", "f"),
    ]
    assert events[0]["text"] == "1 newer one is kept (keep)"
    history.close()


def test_of_each_file_the_newest_versions_are_kept(tmp_path: Path) -> None:
    left = [
        Version(f"/home/ann/{file}.phos-newer-{day}", f"/home/ann/{file}", 4096, day * DAY)
        for file, days in (("a", (3, 1, 2)), ("b", (5,)))
        for day in days
    ]
    engine = Reading(stored={m.id: m for m in [image("a"), image("b", owner=8)]})
    engine.left = {7: [*left], 8: [*left]}
    history = History(tmp_path / "history.db")
    retention = Retention(engine, history)
    assert retention.enforce([UserLimits(user=7, keep_versions=2)], in_use=()) == 0
    assert [each.path for each in engine.left[7]] == [
        f"/home/ann/{name}" for name in ("a.phos-newer-3", "a.phos-newer-2", "b.phos-newer-5")
    ]
    assert engine.left[8] == left and sorted(engine.stored) == ["a", "b"]
    history.flush()
    (event,) = history.query("select kind, subject, text from events")
    assert (event["kind"], event["subject"]) == ("file-deleted", "/home/ann/a.phos-newer-1")
    assert event["text"] == "2 newer ones are kept (keep_versions)"
    history.close()


def test_versions_stay_while_their_file_system_does_not_answer(tmp_path: Path) -> None:
    engine, history = Silent(stored={"a": image("a")}), History(tmp_path / "history.db")
    assert Retention(engine, history).enforce([UserLimits(keep_versions=1, keep=1)], ()) == 0
    history.close()


def test_images_go_after_a_checkpoint_but_not_the_last_of_a_process_that_runs(
    service: Service,
) -> None:
    service.engine.go.set()
    for number in range(3):
        wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
        assert f"image-{number}" in service.engine.stored
    old = UserLimits(keep_days=1)  # the images of the fake engine are of long ago
    service.reconfigure(msgspec.structs.replace(service.config, limits=(old,)))
    wait_until(lambda: list(service.engine.stored) == ["image-2"], "the others to go")
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    wait_until(lambda: list(service.engine.stored) == ["image-3"], "the one before to go")
    wait_until(lambda: "image-2" not in service.call("ListImages"), "it to leave the bus")
    told = msgspec.structs.replace(old, keep_last=False)
    service.reconfigure(msgspec.structs.replace(service.config, limits=(told,)))
    wait_until(lambda: not service.engine.stored, "the last one to go")


def test_output_is_kept_as_long_as_the_history(service: Service) -> None:
    wait_until(lambda: service.engine.outputs_before, "the daily upkeep")
    (before,) = service.engine.outputs_before
    assert abs(time.time() - before - 90 * DAY) < 600


def test_the_output_of_roots_programs_lies_beside_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where root may not look at each of its processes, everything stays.
    monkeypatch.setattr("phosd.engine.criu.files.output_folders._open", lambda names, owner: set())
    name = "20260101T000000-0000ff"
    folder = tmp_path / "state" / "run" / name
    engine = NodeEngine(Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "runtime"))
    try:
        folder.mkdir(parents=True)
        (folder / "stdout").write_text("x")
        for path in (folder / "stdout", folder):
            os.utime(path, (DAY, DAY))
        nobody = 4_000_000_000
        (found,) = engine.unneeded_outputs(0, folder.parent, DAY + 1, ())
        assert (found.name, found.size) == (name, 1)
        assert engine.remove_outputs_of(0, folder.parent, DAY + 1, {"another"}) == []
        with pytest.raises(Unsupported, match=f"there is no user {nobody} here"):
            engine.unneeded_outputs(nobody, folder.parent, DAY + 1, ())
        damaged = tmp_path / "state" / "images" / "20260101T000000-0001"
        damaged.mkdir(mode=0o700)
        (damaged / "manifest.json").touch(mode=0o600)
        for ask in (
            lambda: engine.unneeded_outputs(0, folder.parent, DAY + 1, ()),
            lambda: engine.remove_outputs_of(0, folder.parent, DAY + 1, {name}),
        ):
            with pytest.raises(ImageCorrupt, match=f"{damaged.name} cannot be read, and may need"):
                ask()
        (damaged / "manifest.json").unlink()
        damaged.rmdir()
        assert engine.remove_outputs([nobody], DAY) == 0
        assert engine.remove_outputs([nobody], DAY + 1) == 1
        assert not folder.exists()
    finally:
        engine.close()
