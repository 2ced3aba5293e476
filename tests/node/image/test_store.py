"""The image store: what is visible when, what a deletion removes, whom it trusts."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from phosd.engine.image import private_files
from phosd.engine.image import reader as reader_module
from phosd.engine.image import writer as writer_module
from phosd.engine.image.manifest import CHUNK, Block
from phosd.engine.image.packs import RECORD
from phosd.engine.image.store import Store
from phosd.engine.image.validate import valid_id
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.errors import (
    Busy,
    Cancelled,
    ImageCorrupt,
    Internal,
    NoSuchImage,
    NotAuthorized,
    OutOfSpace,
    Unsupported,
)
from tests.support.samples import CRIU_FILES, everything, fill, manifest_of, publish

ROOT = Path(__file__).parents[3]
CONTENT = bytes(range(256)) * 32 + b"\1" * CHUNK


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def test_a_published_image_is_listed_read_verified_and_deleted(store: Store) -> None:
    manifest = publish(store, CONTENT, owner=1000)
    assert valid_id(manifest.id)
    assert store.list() == [manifest]
    assert store.get(manifest.id) == manifest
    progress = Progress()
    verify(store, manifest.id, progress)
    file_bytes = sum(map(len, CRIU_FILES.values()))
    assert progress.phases[0].bytes_done == progress.phases[0].bytes_total
    assert progress.phases[0].bytes_total == len(CONTENT) + file_bytes
    store.delete(manifest.id)
    assert store.list() == []
    assert everything(store.state) == set()
    with pytest.raises(NoSuchImage):
        store.get(manifest.id)
    with pytest.raises(NoSuchImage):
        store.delete(manifest.id)


def test_an_image_is_invisible_until_published_and_gone_when_aborted(store: Store) -> None:
    with store.begin(0) as writer:
        fill(store, writer, CONTENT)
        assert store.list() == []
        with pytest.raises(NoSuchImage):
            store.get(writer.id)
        assert everything(store.state)
    assert everything(store.state) == set()


def test_everything_is_private(store: Store) -> None:
    publish(store, CONTENT)
    for path in [store.state, *store.state.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_sweep_leaves_the_living_and_removes_the_dead(store: Store) -> None:
    kept = publish(store, CONTENT)
    with store.begin(0) as living:
        fill(store, living, CONTENT)
        before = everything(store.state)
        assert store.sweep() == []
        assert everything(store.state) == before
    dead = crash(store, "manifest-rename")
    assert dead.returncode == -9, dead.stderr
    assert everything(store.state) > set()
    removed = store.sweep()
    assert len([name for name in removed if name.endswith(".pack")]) == 1
    assert len([name for name in removed if valid_id(name)]) == 1
    assert store.list() == [kept]
    verify(store, kept.id, Progress())


@pytest.mark.parametrize("name", ["sweep", "delete"])
def test_an_image_is_published_while_leftovers_are_looked_for(
    store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was no image when the manifests were read, and is no longer locked when its files are."""
    other = publish(store, CONTENT)
    look_for_leftovers: Callable[[], object] = {
        "sweep": store.sweep,
        "delete": lambda: store.delete(other.id),
    }[name]
    unused = private_files.unused
    began = threading.Event()

    def slowly(path: Path) -> bool:
        began.set()
        published.wait(0.5)
        return unused(path)

    monkeypatch.setattr(private_files, "unused", slowly)
    published = threading.Event()
    with ThreadPoolExecutor(1) as beside, store.begin(0) as writer:
        manifest = fill(store, writer, CONTENT)
        looking = beside.submit(look_for_leftovers)
        assert began.wait(10)
        writer.publish(manifest)
        published.set()
        looking.result()
    verify(store, manifest.id, Progress())


PUBLISH = """
    import sys
    from pathlib import Path
    from phosd.engine.image.store import Store
    from tests.support.samples import publish
    publish(Store(Path(sys.argv[1])), b"x" * 4096)
"""
DELETE = """
    import sys
    from pathlib import Path
    from phosd.engine.image.store import Store
    Store(Path(sys.argv[1])).delete(sys.argv[2])
"""


def crash(
    store: Store, fault: str, script: str = PUBLISH, *arguments: str, kind: str = "kill"
) -> "subprocess.CompletedProcess[str]":
    """Run ``script`` on the store with a fault armed."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(store.state), *arguments],
        cwd=ROOT,
        env=os.environ | {"PHOS_FAULT": f"{fault}:{kind}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "fault",
    ["pack-create", "image-seal", "pack-sync", "manifest-write", "manifest-rename"],
)
@pytest.mark.parametrize("kind", ["kill", "enospc", "raise"])
def test_a_failing_publication_leaves_nothing_visible(store: Store, fault: str, kind: str) -> None:
    kept = publish(store, CONTENT)
    whole = everything(store.state)
    outcome = crash(store, fault, kind=kind)
    assert outcome.returncode == (-9 if kind == "kill" else 1)
    if kind != "kill":
        error = "OutOfSpace" if kind == "enospc" else f"Internal: fault point {fault}"
        assert error in outcome.stderr.splitlines()[-1]
    assert store.list() == [kept]
    if kind == "kill":
        store.sweep()
    assert everything(store.state) == whole


def test_a_crash_after_the_rename_leaves_a_whole_image(store: Store) -> None:
    assert crash(store, "manifest-sync").returncode == -9
    (manifest,) = store.list()
    assert store.sweep() == []
    verify(store, manifest.id, Progress())


@pytest.mark.parametrize("fault", ["delete-manifest", "delete-folder", "delete-pack"])
def test_a_crash_in_a_deletion_is_whole_or_gone(store: Store, fault: str) -> None:
    kept = publish(store, CONTENT)
    doomed = publish(store, CONTENT + b"\2" * CHUNK)
    assert crash(store, fault, DELETE, doomed.id).returncode == -9
    listed = store.list()
    for manifest in listed:
        verify(store, manifest.id, Progress())
    assert (doomed in listed) == (fault == "delete-manifest")
    store.sweep()
    if doomed in listed:
        store.delete(doomed.id)
    verify(store, kept.id, Progress())
    assert len(list(store.disk.packs.iterdir())) == 1


def test_packs_that_another_image_needs_stay(store: Store) -> None:
    parent = publish(store, CONTENT)
    with store.begin(0) as writer:
        block = parent.blocks[0]
        writer.publish(
            manifest_of(
                writer, [block], [msgspec.structs.replace(tree, files=()) for tree in parent.trees]
            )
        )
    store.delete(parent.id)
    verify(store, writer.id, Progress())
    store.delete(writer.id)
    assert everything(store.state) == set()


def test_packs_stay_while_a_damaged_manifest_might_need_them(store: Store) -> None:
    damaged = publish(store, CONTENT)
    other = publish(store, CONTENT)
    path = store.disk.images / damaged.id / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    store.delete(other.id)
    assert list(store.damaged()) == [damaged.id]
    assert store.list() == []
    assert len(list(store.disk.packs.iterdir())) == 2
    store.delete(damaged.id)
    assert everything(store.state) == set()


def test_an_image_that_is_read_is_not_deleted(store: Store) -> None:
    manifest = publish(store, CONTENT)
    with store.open(manifest.id) as image:
        with pytest.raises(Busy, match="being read"):
            store.delete(manifest.id)
        with store.open(manifest.id):
            pass
        fd = image.open_file("criu-0", "sub/pages-1.img")
        assert os.read(fd, 10000) == CRIU_FILES["sub/pages-1.img"]
        os.close(fd)
    store.delete(manifest.id)
    assert everything(store.state) == set()


def test_nobody_holds_an_image_who_has_only_copies_of_our_descriptors(store: Store) -> None:
    """As a process has that another thread starts just now, until it begins its program."""
    copies = []
    with store.begin(0) as writer:
        copies.append(os.dup(writer._lock))
        manifest = fill(store, writer, CONTENT)
        writer.publish(manifest)
    with store.open(manifest.id) as image:
        copies.append(os.dup(image.folder))
    store.delete(manifest.id)
    assert store.list() == []
    for copy in copies:
        os.close(copy)


def test_a_missing_pack_is_named(store: Store) -> None:
    manifest = publish(store, CONTENT)
    (store.disk.packs / "0.pack").unlink()
    with pytest.raises(ImageCorrupt, match=r"pack 0 of image .* is missing"):
        verify(store, manifest.id, Progress())


def test_the_secret_is_made_once_and_guarded(tmp_path: Path) -> None:
    first = Store(tmp_path / "state")
    assert Store(tmp_path / "state").key.packed == first.key.packed
    assert Store(tmp_path / "other").key.packed != first.key.packed
    secret = first.state / "secret"
    secret.chmod(0o644)
    with pytest.raises(NotAuthorized, match="secret"):
        Store(tmp_path / "state")
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    with pytest.raises(Internal, match="5 bytes instead of 32"):
        Store(tmp_path / "state")


def test_links_and_files_of_others_are_refused(store: Store, tmp_path: Path) -> None:
    manifest = publish(store, CONTENT)
    pack = store.disk.packs / "0.pack"
    pack.rename(tmp_path / "elsewhere")
    pack.symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(ImageCorrupt, match=r"pack 0 .* is not phosd's file"),
        store.open(manifest.id),
    ):
        pass
    pack.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(pack))
    pack.chmod(0o600)
    with (
        pytest.raises(ImageCorrupt, match=r"pack 0 .* is not phosd's file"),
        store.open(manifest.id),
    ):
        pass
    pack.unlink()
    (tmp_path / "elsewhere").rename(pack)
    pages = store.disk.images / manifest.id / "criu-0/core-7.img"
    pages.unlink()
    pages.symlink_to("/etc/shadow")
    with pytest.raises(ImageCorrupt, match=r"core-7\.img"):
        verify(store, manifest.id, Progress())
    if os.geteuid() == 0:
        os.chown(pack, 1000, 1000)
        with pytest.raises(NotAuthorized, match=r"0\.pack"), store.open(manifest.id):
            pass


@pytest.mark.parametrize(
    "name", ["..", "../../etc", "", "20261120T153012-abcd/x", "x" * 300, "a\0"]
)
def test_an_id_that_is_none_reaches_no_path(store: Store, name: str) -> None:
    for attempt in (store.get, store.delete):
        with pytest.raises(NoSuchImage):
            attempt(name)


def test_a_huge_manifest_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = publish(store, CONTENT)
    monkeypatch.setattr(reader_module, "MAX_MANIFEST", 100)
    with pytest.raises(ImageCorrupt, match="larger than 100 B"):
        store.get(manifest.id)


def test_a_manifest_that_could_not_be_read_is_not_published(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an image cannot be read, nothing in the store can be freed."""
    monkeypatch.setattr(writer_module, "MAX_MANIFEST", 100)
    with pytest.raises(Unsupported, match="more than the 100 B that are read"):
        publish(store, CONTENT)
    assert store.list() == []


def test_a_writer_publishes_only_what_is_its_own(store: Store) -> None:
    with store.begin(1000) as writer:
        manifest = fill(store, writer, CONTENT)
        with pytest.raises(Internal, match="belongs to user 1000"):
            writer.publish(msgspec.structs.replace(manifest, owner=0))
        with pytest.raises(ImageCorrupt, match="says it is"):
            writer.publish(msgspec.structs.replace(manifest, id="20261120T153012-abcd"))
        with pytest.raises(ImageCorrupt, match="not all chunks"):
            writer.publish(msgspec.structs.replace(manifest, blocks=(Block(0, 1, 0, 1 << 30, 0),)))
    assert store.list() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        store = Store(disk / "state")
        with pytest.raises((OutOfSpace, OSError)), store.begin(0) as writer:
            fill(store, writer, CONTENT)
        assert everything(store.state) == set()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_spare_packs_are_taken_and_cut(store: Store) -> None:
    free = store.free_bytes()
    store.spares.preallocate(130 * CHUNK)
    store.spares.preallocate(130 * CHUNK)
    assert [path.stat().st_size for path in store.disk.spare_paths()] == [44 * RECORD] * 3
    assert abs(store.free_bytes() - free) < 64 << 20  # what is set aside counts as free
    manifest = publish(store, CONTENT)
    assert len(store.disk.spare_paths()) == 2
    assert (store.disk.packs / "0.pack").stat().st_size == 2 * RECORD - CHUNK + 8192
    verify(store, manifest.id, Progress())
    store.delete(manifest.id)
    assert store.sweep() == []
    assert len(store.disk.spare_paths()) == 2
    store.spares.drop()
    assert everything(store.state) == set()


def test_room_that_is_not_there_is_not_set_aside(store: Store) -> None:
    with pytest.raises(OutOfSpace):
        store.spares.preallocate(1 << 50)
    assert everything(store.state) == set()


def test_jobs_may_set_room_aside_and_take_it_at_the_same_time(store: Store) -> None:
    def job(number: int) -> str:
        for _ in range(5):
            store.spares.preallocate(70 * CHUNK)
            store.free_bytes()
            made = publish(store, CONTENT + bytes([number]) * CHUNK)
            store.spares.drop()
        return made.id

    with ThreadPoolExecutor(4) as pool:
        last = list(pool.map(job, range(4)))
    assert len(store.list()) == 20
    for image in last:
        verify(store, image, Progress())
    assert store.sweep() == []


def test_a_cancelled_verification_stops(store: Store) -> None:
    made = publish(store, bytes(range(256)) * (40 * CHUNK // 256))
    progress = Progress()
    progress.observer = lambda p: p.cancel() if p.phases[-1].bytes_done else None
    with pytest.raises(Cancelled):
        verify(store, made.id, progress)
    assert progress.phases[0].bytes_done < progress.phases[0].bytes_total
    store.delete(made.id)  # nobody reads it any more
