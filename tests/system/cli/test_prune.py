"""``phos prune``: what nothing needs goes, after it was shown, and only what is one's own."""

import os
import pwd
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phosd.engine.criu.files.file_orders import Output, Version
from phosd.engine.image.manifest import Manifest
from phosd.engine.system.procfs import boot_id, process_id
from phosd.errors import Timeout
from tests.support.fake_engine import manifest
from tests.support.service import Service
from tests.system.cli.test_client import at_a_terminal, lines, phos
from tests.system.cli.test_lists import as_nobody

DAY = 86_400.0
NOBODY = pwd.getpwnam("nobody").pw_uid
NAMES = [f"20260101T000000-{number:06x}" for number in range(3)]


def made(image: str, days: float, start: int = 1, pid: int = 1, owner: int = 0) -> Manifest:
    """An image so many days old; the process of pid and start time, of this boot."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - days * DAY))
    found = manifest(image, pid=pid, start_time=start, boot=boot_id(), owner=owner)
    return replace(found, created=when)


@pytest.fixture
def full(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Root has two old outputs and a new one, and nobody one; images are of two processes that have
    ended and of this one.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    now, me = time.time(), process_id(os.getpid())
    assert me is not None
    service.engine.outputs = {
        0: [
            Output(name, 1 << 20, now - age)
            for name, age in zip(NAMES, (9e6, 8e6, 60), strict=True)
        ],
        NOBODY: [Output(NAMES[0], 5, 0.0)],
    }
    service.engine.stored = {
        image.id: image
        for image in (
            made("a1", 50, start=1),
            made("a2", 40, start=1),
            made("b1", 45, start=2),
            made("mine1", 60, start=me.start_time, pid=me.pid),
            made("mine2", 59, start=me.start_time, pid=me.pid),
            made("theirs", 90, owner=NOBODY),
        )
    }
    return service


def test_a_dry_run_lists_and_deletes_nothing(full: Service, tmp_path: Path) -> None:
    rows = lines(phos(full, "prune", "--dry-run", "--json").stdout)
    runs = tmp_path / "phos" / "run"
    assert [(row["kind"], row["name"]) for row in rows] == [
        ("output", f"{runs}/{name}") for name in NAMES[:2]
    ]
    assert full.engine.outputs_asked[-1] == (0, runs, frozenset())
    table = phos(full, "prune", "--dry-run", "--images", "30d").stdout
    assert [line.split()[-1] for line in table.splitlines()[1:]] == [
        *("a1", "mine1"),
        *(f"{runs}/{name}" for name in NAMES[:2]),
    ]
    assert full.engine.outputs_asked[-1][2] == {"a1", "mine1"}, "what they alone need goes along"
    assert len(full.engine.stored) == 6 and len(full.engine.outputs[0]) == 3


def test_what_restores_have_left_of_files(full: Service) -> None:
    """Long paths are removed in as many calls as that takes."""
    now = time.time()
    old = [f"/data/{'x' * 200}{number}.phos-newer-0a" for number in range(100)]
    full.engine.left = {
        0: [
            *(Version(path, "/data/x", 1 << 20, now - 9 * DAY) for path in old),
            Version("/data/x.phos-newer-1b", "/data/x", 4096, now - DAY),
        ],
        NOBODY: [Version("/data/y.phos-newer-1b", "/data/y", 4096, now - 9 * DAY)],
    }
    assert phos(full, "prune", "--yes").returncode == 0
    assert len(full.engine.left[0]) == 101, "not unless it is said"
    table = phos(full, "prune", "--dry-run", "--files", "7d").stdout
    assert table.count("file") == 100 and "a restore has put an older one in its place" in table
    done = phos(full, "prune", "--yes", "--files", "7d", "--json")
    gone = [row["name"] for row in lines(done.stdout) if row.get("deleted")]
    assert (done.returncode, gone) == (0, old)
    assert [each.path for each in full.engine.left[0]] == ["/data/x.phos-newer-1b"]
    assert len(full.engine.left[NOBODY]) == 1
    shown = phos(full, "images", "mine1").stdout
    assert "/data/x" in shown and "phos prune --files 7d" in shown
    one: Any = lines(phos(full, "images", "mine1", "--json").stdout)[0]
    (file,) = one["files"]
    full.engine.silent = Timeout("its file system takes over 5 s", hint="look at it")
    done = phos(full, "images", "mine1")
    assert (done.returncode, "mine1" in done.stdout) == (0, True)
    assert "the files of the image are not listed: its file system takes over" in done.stderr
    assert (file["path"], [left["bytes"] for left in file["left"]]) == ("/data/x", [4096])


def test_it_asks_before_it_deletes(full: Service) -> None:
    done = phos(full, "prune")
    assert (done.returncode, "needs your consent" in done.stderr) == (2, True)
    assert len(full.engine.outputs[0]) == 3
    done = phos(full, "prune", "--yes", "--json")
    assert done.returncode == 0
    gone = [str(row["name"]) for row in lines(done.stdout) if "deleted" in row]
    assert [Path(name).name for name in gone] == NAMES[:2]
    assert [output.name for output in full.engine.outputs[0]] == [NAMES[2]]
    again = phos(full, "prune", "--yes")
    assert (again.returncode, again.stdout) == (0, "")
    assert "there is nothing to delete" in again.stderr


@pytest.mark.parametrize(("typed", "left"), [("n", 3), ("y", 1)])
def test_at_a_terminal_it_asks(full: Service, typed: str, left: int) -> None:
    done = at_a_terminal(full, typed, "prune")
    assert "delete these 2 for good, 2.0 MiB at most?" in done.stderr
    assert (done.returncode == 0, len(full.engine.outputs[0])) == (typed == "y", left)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("--images", "30d"), {"a2", "b1", "mine2", "theirs"}),
        (("--images", "30d", "--keep", "0"), {"mine2", "theirs"}),
        (("--images", "42d", "--keep", "0"), {"a2", "mine2", "theirs"}),
        (("--images", "30d", "--keep", "2"), {"a1", "a2", "b1", "mine1", "mine2", "theirs"}),
    ],
)
def test_old_images_go_but_the_last_of_who_runs(
    full: Service, words: tuple[str, ...], left: set[str]
) -> None:
    """And nobody else's, also for root."""
    assert phos(full, "prune", "--yes", *words).returncode == 0
    assert set(full.engine.stored) == left


def test_an_image_that_is_damaged_is_not_the_last_good_one(full: Service) -> None:
    full.history.image(full.engine.stored["mine2"], whole=False)
    full.history.flush()
    phos(full, "prune", "--yes", "--images", "30d", "--keep", "0")
    assert set(full.engine.stored) == {"mine1", "theirs"}


def test_users_delete_what_is_theirs(full: Service) -> None:
    done = as_nobody(full, "prune", "--yes", "--images", "1d", "--keep", "0")
    assert done.returncode == 0, done.stderr
    assert "theirs" not in full.engine.stored and len(full.engine.stored) == 5
    assert (full.engine.outputs[NOBODY], len(full.engine.outputs[0])) == ([], 3)


def test_output_that_is_needed_by_then_stays_and_is_named(
    full: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full.engine, "remove_outputs_of", lambda *_: [NAMES[1]])
    done = phos(full, "prune", "--yes")
    assert done.returncode == 5
    assert f"{NAMES[0]} is needed meanwhile, and stays" in done.stderr
    assert done.stdout.endswith(f"{NAMES[1]} is deleted\n")


@pytest.mark.parametrize("words", [("--older", "soon"), ("--older", "59s"), ("--images", "-1d")])
def test_ages(full: Service, words: tuple[str, ...]) -> None:
    assert phos(full, "prune", "--yes", *words).returncode == 2
    assert len(full.engine.outputs[0]) == 3
