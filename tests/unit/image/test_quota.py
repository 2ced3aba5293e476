"""What images take, and how much a user may have of it."""

from pathlib import Path

import msgspec
import pytest

from phosd.engine.image.manifest import CHUNK, Manifest
from phosd.engine.image.store import Store
from phosd.engine.image.usage import Usage, file_bytes, pack_bytes
from phosd.errors import OutOfSpace
from tests.support.samples import everything, fill, manifest_of, publish

FILES = 9900
"""Bytes of the files that a sample has besides its chunks."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def chunks(*values: int) -> bytes:
    return b"".join(bytes([value]) * CHUNK for value in values)


def child_of(store: Store, parent: Manifest, quota: int | None = None) -> Manifest:
    """An image with the chunks of its parent and no files."""
    with store.begin(parent.owner, quota) as writer:
        trees = [msgspec.structs.replace(tree, files=()) for tree in parent.trees]
        made = manifest_of(writer, parent.blocks, trees)
        writer.publish(made)
    return made


def test_shared_chunks_are_counted_once(store: Store) -> None:
    parent = publish(store, chunks(1, 2))
    child = child_of(store, parent)
    alone = publish(store, chunks(3))
    assert sum(pack_bytes(parent).values()) == 2 * CHUNK
    assert file_bytes(parent) == FILES
    usage = Usage([parent, child, alone])
    assert usage.total == 3 * CHUNK + 2 * FILES
    assert usage.remove(parent.id) == FILES
    assert usage.remove(child.id) == 2 * CHUNK
    assert usage.total == CHUNK + FILES


def test_suspended_programs_count_with_the_images(store: Store) -> None:
    publish(store, chunks(1), owner=7)
    assert store.taken(7) == CHUNK + FILES
    suspended = {7: CHUNK, 8: 10 * CHUNK}
    with store.begin(7, 3 * CHUNK + FILES, suspended.__getitem__) as writer:
        writer.reserve(CHUNK)
        assert store.taken(7) == 2 * CHUNK + FILES
        with pytest.raises(OutOfSpace, match="the images and suspended programs of uid 7 take"):
            writer.reserve(CHUNK + 1)


def test_an_image_beyond_the_quota_is_refused_and_told_what_to_delete(store: Store) -> None:
    for value in (1, 2):
        publish(store, chunks(value), owner=7)
    first, second = store.list()
    publish(store, chunks(1, 2, 3), owner=8)
    quota = 2 * (CHUNK + FILES) + 100
    with store.begin(7, quota) as writer:
        writer.reserve(100)
        with pytest.raises(OutOfSpace) as caught:
            writer.reserve(CHUNK)
        assert str(caught.value) == (
            "the image takes about 2.0 MiB, but the images of uid 7 take 4.0 MiB of the 4.0 MiB "
            f"that they may; delete {first.id} (`phos rm`), the oldest, which frees 2.0 MiB"
        )
        with pytest.raises(OutOfSpace, match=f"delete {first.id}, {second.id} "):
            writer.reserve(2 * CHUNK + FILES)
        with pytest.raises(OutOfSpace, match="it does not fit: ask for a larger quota"):
            writer.reserve(quota + 1)
    with store.begin(8, 4 * CHUNK) as writer, pytest.raises(OutOfSpace):
        writer.reserve(CHUNK)
    with store.begin(9, CHUNK) as writer:
        writer.reserve(CHUNK)


def test_images_that_are_being_made_count(store: Store) -> None:
    with store.begin(7, 3 * CHUNK) as one, store.begin(7, 3 * CHUNK) as two:
        one.reserve(2 * CHUNK)
        two.reserve(CHUNK)
        with pytest.raises(OutOfSpace):
            two.reserve(CHUNK + 1)
        one.abort()
        two.reserve(3 * CHUNK)
    assert store.reservations == {}


def test_what_was_written_is_held_against_the_quota_again(store: Store) -> None:
    with store.begin(7, CHUNK + FILES - 1) as writer:
        writer.reserve(0)
        with pytest.raises(OutOfSpace):
            writer.publish(fill(store, writer, chunks(1)))
    assert store.list() == []
    assert everything(store.state) == set()
    with store.begin(7, FILES - 1) as writer, pytest.raises(OutOfSpace):
        fill(store, writer, chunks(1))
    with store.begin(7, CHUNK + FILES) as writer:
        writer.publish(fill(store, writer, chunks(1)))
    child_of(store, store.list()[0], CHUNK + FILES)  # it takes nothing of its own
