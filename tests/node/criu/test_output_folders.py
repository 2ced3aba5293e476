"""Output folders of ``phos run`` go when nobody needs them; each reason to keep one does so."""

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from phosd.engine.criu.files.output_folders import remove_unneeded, unneeded
from phosd.engine.image.cpu_manifest import CpuDetails, OpenFile
from phosd.engine.image.manifest import CHUNK, Manifest
from phosd.engine.image.store import Store
from phosd.errors import Unsupported
from tests.node.criu.life import USER
from tests.support.samples import publish

OLD = 1_000_000.0
OWNER = (USER, USER, (USER,))


@pytest.fixture
def runs() -> Iterator[Path]:
    """The user's folder, in one that everybody may enter."""
    base = Path("/tmp") / f"phos-outputs-{os.getpid()}"
    base.mkdir(mode=0o755)
    folder = base / "run"
    folder.mkdir(mode=0o700)
    os.chown(folder, USER, USER)
    yield folder
    for path in sorted(base.rglob("*"), reverse=True):
        path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()
    base.rmdir()


def made(runs: Path, number: int, when: float = OLD) -> Path:
    """A folder as ``phos run`` leaves it, last written to ``when``."""
    folder = runs / f"20260101T000000-{number:06x}"
    folder.mkdir()
    for path in (folder / "stdout", folder / "stderr", folder):
        if path != folder:
            path.write_text("x")
        os.chown(path, USER, USER)
        os.utime(path, (when, when))
    return folder


def aged(folder: Path) -> Path:
    os.utime(folder, (OLD, OLD))
    return folder


def naming(image: Manifest, path: Path) -> Manifest:
    """The image, of a program that had a file open."""
    file = OpenFile(7, 1, str(path), os.O_WRONLY | os.O_APPEND, 1, 1)
    details = CpuDetails(USER, USER, (USER,), "", "", False, 0, open_files=(file,))
    tree = msgspec.structs.replace(image.trees[0], details=details)
    return msgspec.structs.replace(image, trees=(tree,))


def test_what_is_needed_stays_and_the_rest_goes(runs: Path, tmp_path: Path) -> None:
    needless = made(runs, 1)
    young = made(runs, 2, time.time())
    in_use = made(runs, 3)
    named = made(runs, 4)
    image = naming(publish(Store(tmp_path / "state"), bytes(CHUNK)), named / "stdout")
    with (in_use / "stdout").open("a"):
        gone = remove_unneeded(runs, OWNER, [image], OLD + 1)
    assert gone == [needless.name]
    with (in_use / "stdout").open("a"):
        assert [each.name for each in unneeded(runs, OWNER, [], OLD + 1)] == [named.name]
        (found,) = unneeded(runs, OWNER, [], OLD + 1)
        assert (found.size, found.written) == (2, OLD)
        assert remove_unneeded(runs, OWNER, [], OLD + 1, names={in_use.name}) == []
    assert sorted(runs.iterdir()) == [young, in_use, named]
    assert remove_unneeded(runs, OWNER, [], OLD + 1) == [in_use.name, named.name]
    assert remove_unneeded(runs, OWNER, [], time.time() + 1) == [young.name]
    assert remove_unneeded(runs.parent / "none", OWNER, [], OLD) == []
    closed = runs.parent / "closed"
    closed.mkdir(mode=0o700)
    for folder, why in ((closed, "Permission denied"), (Path("/etc/passwd"), "Not a directory")):
        with pytest.raises(Unsupported, match=f"{folder}: {why}; name the folder"):
            unneeded(folder, OWNER, [], OLD)


def test_a_first_process_that_is_closed_to_all_is_none_of_ours(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A security module may close it, to root, too; another one may have the folder open."""
    needless = made(runs, 1)
    os.chown(runs, 0, 0)
    os.chown(needless, 0, 0)
    iterdir, root = Path.iterdir, (0, 0, (0,))
    for pid, ours in ((os.getpid(), True), (1, False)):
        closed = Path(f"/proc/{pid}/fd")

        def entries(folder: Path, closed: Path = closed) -> Iterator[Path]:
            if folder == closed:
                raise PermissionError
            return iterdir(folder)

        monkeypatch.setattr(Path, "iterdir", entries)
        with pytest.raises(PermissionError) if ours else nullcontext():
            assert [each.name for each in unneeded(runs, root, [], OLD + 1)] == [needless.name]


def test_nothing_is_removed_that_phos_did_not_make_or_the_owner_may_not(
    runs: Path, tmp_path: Path
) -> None:
    elsewhere = made(runs.parent, 1)
    (runs / elsewhere.name).symlink_to(elsewhere)
    other = runs / "notes"
    other.mkdir()
    aged(other)
    deep = made(runs, 2)
    (deep / "mine").mkdir()
    aged(deep)
    roots = made(runs, 3)
    os.chown(roots, 0, 0)
    assert unneeded(runs, OWNER, [], time.time() + 1) == []
    assert unneeded(runs, (0, 0, ()), [], OLD) == [], "of the user alone"
    os.utime(roots, (OLD, OLD))
    before = sorted(runs.rglob("*"))
    assert remove_unneeded(runs, OWNER, [], OLD + 10) == []
    assert sorted(runs.rglob("*")) == before
    assert (elsewhere / "stdout").exists()
