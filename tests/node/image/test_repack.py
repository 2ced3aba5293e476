"""Packs below half alive are written anew, and nothing is ever missing on the way."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from phosd.engine.faults import Point
from phosd.engine.image.manifest import CHUNK, Manifest
from phosd.engine.image.packs import RECORD
from phosd.engine.image.repack import compact
from phosd.engine.image.store import Store, packs_of
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from tests.support.samples import everything, manifest_of, publish
from tests.system.faults.case import COMPACT


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def chunks(count: int) -> bytes:
    return b"".join(bytes([value + 1]) * CHUNK for value in range(count))


def child_of(store: Store, parent: Manifest, first: int, count: int) -> Manifest:
    """An image with some of the chunks of its parent."""
    with store.begin(parent.owner) as writer:
        (block,) = parent.blocks
        kept = block.chunks[first : first + count]
        blocks = [msgspec.structs.replace(block, chunks=kept, size=CHUNK * count)]
        trees = [msgspec.structs.replace(tree, files=()) for tree in parent.trees]
        made = manifest_of(writer, blocks, trees)
        writer.publish(made)
    return made


def wasteful(store: Store) -> tuple[Manifest, Manifest]:
    """Two children that need two chunks of five, since their parent is gone."""
    parent = publish(store, chunks(5))
    children = child_of(store, parent, 1, 2), child_of(store, parent, 2, 1)
    store.delete(parent.id)
    return children


def sizes(store: Store) -> list[int]:
    return [store.pack_path(number).stat().st_size for number in store.pack_numbers()]


def always() -> bool:
    return True


def digests(image: Manifest) -> list[str]:
    return [chunk.digest for block in image.blocks for chunk in block.chunks]


def test_what_nobody_needs_is_left_out(store: Store) -> None:
    before = wasteful(store)
    assert sizes(store) == [5 * RECORD]
    assert compact(store, always) == 3 * RECORD
    assert sizes(store) == [2 * RECORD]
    for image in before:
        now = store.get(image.id)
        assert digests(now) == digests(image)
        assert packs_of(now) == {1}
        assert now.parent == image.parent
        verify(store, image.id, Progress())
    assert compact(store, always) == 0
    assert store.sweep() == []


def test_half_is_enough(store: Store) -> None:
    parent = publish(store, chunks(4))
    child = child_of(store, parent, 0, 2)
    store.delete(parent.id)
    assert compact(store, always) == 0
    assert packs_of(store.get(child.id)) == {0}


def test_what_a_job_reads_or_writes_is_left_alone(store: Store) -> None:
    first, second = wasteful(store)
    for image in (first, second):  # a restore, or a child that drains against it
        with store.open(image.id) as opened:
            assert compact(store, always) == 0
            assert list(opened.packs) == [0]
    pack = os.open(store.pack_path(0), os.O_RDONLY)
    fcntl.flock(pack, fcntl.LOCK_EX)
    assert compact(store, always) == 0
    os.close(pack)
    assert compact(store, always) == 3 * RECORD


def test_it_stops_when_it_is_told(store: Store) -> None:
    wasteful(store)
    assert compact(store, lambda: False) == 0


def test_a_damaged_chunk_stays_where_it_is(store: Store) -> None:
    first, _ = wasteful(store)
    offset = first.blocks[0].chunks[0].offset
    with store.pack_path(0).open("r+b") as file:
        file.seek(offset + 4096 + 100)
        file.write(b"x")
    before = everything(store.state)
    assert compact(store, always) == 0
    assert everything(store.state) == before | {"packs/0.damaged"}


def test_nothing_is_done_while_a_manifest_is_damaged(store: Store) -> None:
    wasteful(store)
    damaged = publish(store, chunks(1))
    path = store.disk.images / damaged.id / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert compact(store, always) == 0


COMPACTS = """
import sys
from pathlib import Path
from phosd.engine.image.repack import compact
from phosd.engine.image.store import Store
compact(Store(Path(sys.argv[1])), lambda: True)
"""


@pytest.mark.parametrize("visit", [1, 2])
@pytest.mark.parametrize("fault", COMPACT)
def test_a_crash_at_any_step_loses_nothing(store: Store, fault: Point, visit: int) -> None:
    images = wasteful(store)
    killed = subprocess.run(
        [sys.executable, "-c", COMPACTS, str(store.state)],
        env=os.environ | {"PHOS_FAULT": f"{fault}:{visit}:kill"},
        check=False,
    )
    twice = "manifest" in fault
    assert killed.returncode == (-9 if visit == 1 or twice else 0)
    again = Store(store.state)
    again.sweep()
    for image in images:
        assert digests(again.get(image.id)) == digests(image)
        verify(again, image.id, Progress())
    compact(again, always)
    # When only one of the two was told, what they share is there twice.
    assert sum(sizes(again)) < 5 * RECORD
    for image in images:
        verify(again, image.id, Progress())
    for image in images:
        again.delete(image.id)
    assert everything(again.state) == set()


@pytest.mark.parametrize("kind", ["enospc", "raise"])
@pytest.mark.parametrize("fault", ["compact-create", "compact-sync", "compact-manifest-write"])
def test_a_failure_leaves_every_image_whole(store: Store, fault: str, kind: str) -> None:
    images = wasteful(store)
    failed = subprocess.run(
        [sys.executable, "-c", COMPACTS, str(store.state)],
        env=os.environ | {"PHOS_FAULT": f"{fault}:1:{kind}"},
        check=False,
        capture_output=True,
    )
    assert failed.returncode == 1
    store.sweep()
    for image in images:
        verify(store, image.id, Progress())
