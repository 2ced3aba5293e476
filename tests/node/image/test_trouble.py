"""The store's disk goes away, comes back, is another, is read-only; images of other versions."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from phosd import __version__
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.store import Store
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.errors import ImageCorrupt, Internal, NoSuchImage
from tests.support.samples import everything, publish, rewrite

CONTENT = bytes(CHUNK)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def refused(store: Store, image: str, match: str) -> None:
    """Every operation says the same, and what to do."""
    attempts: list[Callable[[], object]] = [
        lambda: store.begin(0),
        lambda: store.delete(image),
        lambda: store.get(image),
        store.sweep,
        store.list,
    ]
    for attempt in attempts:
        with pytest.raises(Internal, match=match):
            attempt()
    with pytest.raises(Internal, match=match), store.open(image):
        pass


def test_a_store_that_is_gone_is_said_to_be_and_works_when_it_is_back(store: Store) -> None:
    made = publish(store, CONTENT)
    elsewhere = store.state.with_name("elsewhere")
    store.state.rename(elsewhere)
    refused(store, made.id, r"cannot be reached \(No such file or directory\); bring the folder")
    assert not store.state.exists()
    elsewhere.rename(store.state)
    verify(store, made.id, Progress())
    publish(store, CONTENT)
    assert len(store.list()) == 2


def test_another_store_in_its_place_is_not_written_to(store: Store, tmp_path: Path) -> None:
    made = publish(store, CONTENT)
    other = Store(tmp_path / "other")
    before = everything(other.state)
    store.state.rename(store.state.with_name("elsewhere"))
    shutil.copytree(other.state, store.state)
    for attempt in (lambda: store.begin(0), lambda: store.delete(made.id), store.sweep):
        with pytest.raises(Internal, match="is another store than the one that phosd began with"):
            attempt()
    assert everything(store.state) == before


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64M,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("only a root that may mount can try this")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_read_only_store_is_read(disk: Path) -> None:
    store = Store(disk / "state")
    made = publish(store, CONTENT)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    verify(store, made.id, Progress())
    assert store.list() == [made]
    for attempt in (lambda: store.begin(0), lambda: store.delete(made.id)):
        with pytest.raises(Internal, match="is on a file system that is read-only; see the kernel"):
            attempt()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    store.delete(made.id)
    assert everything(store.state) == set()


@pytest.mark.parametrize("number", [0, 2])
def test_an_image_of_another_format_is_told_as_that(store: Store, number: int) -> None:
    kept, other = publish(store, CONTENT), publish(store, CONTENT)
    manifest = msgspec.json.decode(msgspec.json.encode(other))
    manifest |= {"format": number, "what no other version knows": 1}
    rewrite(store, other.id, msgspec.json.encode(manifest))
    assert store.list() == [kept]
    (error,) = store.damaged().values()
    assert str(error) == (
        f"image {other.id} was made by another phosd in format {number}; this is phosd "
        f"{__version__}, which reads format 1; restore it with the one that made it or a newer "
        "one, or delete it"
    )
    with pytest.raises(ImageCorrupt, match="was made by"), store.open(other.id):
        pass
    store.delete(kept.id)  # its packs cannot be told from the other's
    store.delete(other.id)
    assert everything(store.state) == set()


def test_a_manifest_that_changes_after_it_was_read_is_read_again(store: Store) -> None:
    made = publish(store, CONTENT)
    assert store.get(made.id) is store.get(made.id) is store.list()[0]
    path = store.disk.images / made.id / "manifest.json"
    text = path.read_bytes()
    path.write_bytes(text[:-9] + b"x" + text[-8:])
    with pytest.raises(ImageCorrupt):
        store.get(made.id)
    path.write_bytes(text)
    assert store.get(made.id) == made
    store.delete(made.id)
    with pytest.raises(NoSuchImage):
        store.get(made.id)
