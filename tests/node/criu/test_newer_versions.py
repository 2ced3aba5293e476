"""What restores have left beside a program's files is found and removed, and nothing else."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from phosd.engine.criu.files.file_versions import files_of, left, remove_left
from phosd.engine.image.cpu_manifest import CpuDetails, DeclaredState, OpenFile, WrittenFile
from phosd.engine.image.manifest import Manifest
from tests.node.criu.life import USER
from tests.support.fake_engine import manifest

OWNER = (USER, USER, (USER,))
SOON = 60.0


@pytest.fixture
def home() -> Iterator[Path]:
    """The user's folder, in one that everybody may enter."""
    base = Path("/tmp") / f"phos-versions-{os.getpid()}"
    folder = base / "home"
    folder.mkdir(parents=True)
    base.chmod(0o755)
    os.chown(folder, USER, USER)
    yield folder
    for path in sorted(base.rglob("*"), reverse=True):
        path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()
    base.rmdir()


def made(path: Path, content: str = "", uid: int = USER) -> str:
    path.write_text(content)
    os.chown(path, uid, uid)
    return str(path)


def holding(image: str, *written: Path, cut: Path | None = None) -> Manifest:
    """An image of the user that holds files, and has one that it would only cut."""
    found = manifest(image, owner=USER)
    files = [WrittenFile(str(path), "files/0", 5, 0o600, USER, 1, 1) for path in written]
    opened = [OpenFile(1, 1, str(path), os.O_WRONLY, 5, 1) for path in (cut,) if path is not None]
    details = CpuDetails(
        *OWNER, "", "", False, 0, written_files=tuple(files), open_files=tuple(opened)
    )
    return replace(found, trees=(replace(found.trees[0], details=details),))


def test_they_are_found_and_removed(home: Path) -> None:
    data, log = home / "data.sqlite", home / "log"
    image = holding("i", data, cut=log)
    assert files_of(image) == {str(data): 5}
    ours = [
        made(home / "data.sqlite.phos-newer-0a1b2c3d", "x" * 10_000),
        made(home / "data.sqlite.phos-newer-11111111"),
        made(home / "log.phos-tail-0a1b2c3d"),
    ]
    others = [
        made(data),
        made(home / "data.sqlite.phos-undo-0a1b2c3d"),
        made(home / "data.sqlite.phos-newer-root", uid=0),
        made(home / "other.phos-newer-0a1b2c3d"),
        made(home / "data.sqlite.phos-newer-"),
        made(home / os.fsdecode(b"data.sqlite.phos-newer-\xff")),
    ]
    (home / "log.phos-tail-link").symlink_to(data)
    (home / "log.phos-tail-folder").mkdir()
    os.utime(ours[0], (1.0, 1.0))  # its own time does not tell when it was left
    found = left(OWNER, [image], [], time.time() + SOON)
    assert [each.path for each in found] == sorted(ours)
    assert (found[0].file, found[0].size >= 10_000) == (str(data), True)
    assert time.time() - found[0].left < SOON
    assert left(OWNER, [image], [], time.time() - SOON) == []
    assert remove_left(OWNER, [image], [], time.time() - SOON, ours) == []
    assert remove_left(OWNER, [image], [], time.time() + SOON, [ours[0], *others[:-1]]) == [ours[0]]
    assert [each.path for each in left(OWNER, [image], [], time.time() + SOON)] == ours[1:]
    assert all(Path(path).exists() for path in others)


def test_what_a_job_may_need_stays(home: Path) -> None:
    """A restore that fails puts what it has replaced back."""
    one, other = home / "one", home / "other"
    ours = [made(home / f"{path.name}.phos-newer-0a1b2c3d") for path in (one, other)]
    images = [holding("i", one, other), holding("j", one)]
    assert remove_left(OWNER, images, images[1:], time.time() + SOON, ours) == [ours[1]]


def test_what_was_put_aside_in_declared_places(home: Path) -> None:
    """Also whole folders, and links."""
    kept, logs = home / "kept", home / "logs"
    for folder in (kept, logs):
        folder.mkdir()
    aside, link = kept / "400.phos-newer-0a1b2c3d", kept / "latest.phos-newer-0a1b2c3d"
    (aside / "deep").mkdir(parents=True)
    (aside / "deep" / "weights").write_bytes(b"x" * 100_000)
    link.symlink_to("400")
    made(logs / "b.csv.phos-newer-0a1b2c3d")
    made(logs / "b.txt.phos-newer-0a1b2c3d")  # of another program
    for path in (aside, link):
        os.chown(path, USER, USER, follow_symlinks=False)
    for path in (kept, logs, aside / "deep"):
        os.chown(path, USER, USER)
    image = holding("i")
    (tree,) = image.trees
    assert tree.details is not None
    state = DeclaredState((str(kept), str(logs / "*.csv")), (), {str(kept): 0o755}, {})
    declared = replace(tree.details, declared=state)
    image = replace(image, trees=(replace(tree, details=declared),))
    found = left(OWNER, [image], [], time.time() + SOON)
    ours = [str(aside), str(link), str(logs / "b.csv.phos-newer-0a1b2c3d")]
    assert [each.path for each in found] == ours
    assert found[0].size > 100_000
    assert left(OWNER, [image], [image], time.time() + SOON) == []
    assert remove_left(OWNER, [image], [], time.time() + SOON, ours) == ours
    assert [*kept.iterdir()] == []


def test_folders_that_are_gone_or_closed(home: Path) -> None:
    closed = home / "closed"
    closed.mkdir(mode=0o700)
    image = holding("i", closed / "file", home / "none" / "file", Path("/etc/passwd/file"))
    assert left(OWNER, [image], [], time.time() + SOON) == []
