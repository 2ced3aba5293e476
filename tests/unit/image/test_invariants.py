"""Where an image would be published too early, or a pack removed too early, nothing is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phosd.engine.faults import Point
from phosd.engine.image import repack
from phosd.engine.image import store as store_module
from phosd.engine.image.complete import require_complete
from phosd.engine.image.manifest import CHUNK, Manifest
from phosd.engine.image.store import Store
from phosd.engine.image.tier import MANIFEST
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.errors import Internal
from tests.support.samples import everything, fill, publish
from tests.unit.image.test_sharing import Roomy

CONTENT = b"1" * CHUNK + b"2" * CHUNK


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def cut(path: Path) -> None:
    """Take the last byte away."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


BREAKS: dict[str, tuple[Callable[[Store, Manifest], object], str]] = {
    "a file is missing": (
        lambda store, image: (store.disk.images / image.id / "criu-0/core-7.img").unlink(),
        "criu-0/core-7.img is missing",
    ),
    "a file is short": (
        lambda store, image: cut(store.disk.images / image.id / "criu-0/sub/pages-1.img"),
        "criu-0/sub/pages-1.img has 8999 bytes instead of 9000",
    ),
    "a pack is missing": (
        lambda store, image: store.disk.pack_path(0).unlink(),
        "pack 0 is missing",
    ),
    "a pack is short": (lambda store, image: cut(store.disk.pack_path(0)), "pack 0 has "),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_manifest_is_not_written_before_all_that_it_names(store: Store, name: str) -> None:
    """Invariant 5, in an image that is made: nothing of it stays."""
    break_it, words = BREAKS[name]
    with pytest.raises(Internal, match=r"\(invariant 5\)") as raised, store.begin(0) as writer:
        image = fill(store, writer, CONTENT)
        break_it(store, image)
        writer.publish(image)
    assert words in raised.value.what and raised.value.hint
    assert store.list() == [] and everything(store.state) == set()


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_missing_is_named(store: Store, name: str) -> None:
    break_it, words = BREAKS[name]
    image = publish(store, CONTENT)
    folder = store.disk.images / image.id
    require_complete(image, folder, store.pack_path)
    break_it(store, image)
    with pytest.raises(Internal) as raised:
        require_complete(image, folder, store.pack_path)
    assert words in raised.value.what


def test_nor_when_it_goes_to_the_disk(tmp_path: Path) -> None:
    """A pack is there already, as after a crash, and is not whole: the image stays in memory."""
    store = Store(tmp_path / "state", memory=Roomy(tmp_path / "memory", 1 << 40))
    image = publish(store, CONTENT, size=1 << 20)
    assert not store.is_durable(image.id)
    store.disk.pack_path(0).write_bytes(b"part of it")
    with pytest.raises(Internal, match=r"pack 0 has 10 bytes .*") as raised:
        store.write_back.write(image.id, Progress())
    assert "invariant 5" in raised.value.what
    assert store.list() == [image] and not store.is_durable(image.id)


def test_no_pack_is_removed_that_a_manifest_names(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: whoever looks for packs that nobody needs, and overlooks an image."""
    kept, deleted = publish(store, CONTENT), publish(store, b"3" * CHUNK, owner=1)
    packs_of, overlooked = store_module.packs_of, [kept.id]

    def overlooking(image: Manifest) -> set[int]:
        return set() if overlooked and image.id == overlooked.pop() else packs_of(image)

    monkeypatch.setattr(store_module, "packs_of", overlooking)
    with pytest.raises(Internal, match=rf"image {kept.id} names it") as raised:
        store.delete(deleted.id)
    assert "(invariant 7)" in raised.value.what and raised.value.hint
    assert [*store.pack_numbers()] == [0, 1]
    assert store.sweep() == ["1.pack"]


def test_no_pack_is_removed_while_a_manifest_cannot_be_read(store: Store) -> None:
    image = publish(store, CONTENT)
    (store.disk.images / image.id / MANIFEST).write_bytes(b"{}")
    with store.locked(), pytest.raises(Internal, match=rf"image {image.id}, which cannot be read"):
        store.require_unneeded({7})


def test_no_pack_is_removed_that_an_unfinished_image_may_name(store: Store) -> None:
    image = publish(store, CONTENT)
    with store.begin(0):
        store.delete(image.id)
        assert [*store.pack_numbers()] == [0]
        with store.locked(), pytest.raises(Internal, match="an unfinished image may name it"):
            store.require_unneeded({0})
    with store.locked():
        store.require_unneeded({0})


def wasteful(store: Store) -> tuple[Manifest, int]:
    """An image that needs one chunk of a pack of four, and that pack."""
    parent = publish(store, CONTENT + b"3" * CHUNK + b"4" * CHUNK)
    with store.begin(0) as writer:
        ref = parent.blocks[0].chunks[0]
        assert writer.find(ref.digest) == ref
        made = fill(store, writer, b"5" * CHUNK)
        (block,) = made.blocks
        both = replace(block, chunks=(ref, *block.chunks), size=2 * CHUNK)
        child = replace(made, blocks=(both,))
        writer.publish(child)
    store.delete(parent.id)
    return child, ref.pack


def test_no_pack_is_removed_after_it_was_rewritten_while_it_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, pack = wasteful(store)
    monkeypatch.setattr(repack, "_replace", lambda *_: None)
    with pytest.raises(Internal, match=rf"image {child.id} names it"):
        repack.compact(store, lambda: True)
    assert pack in store.pack_numbers()


def test_no_manifest_names_a_rewritten_pack_that_is_not_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 5, where a manifest is replaced: the old one stays, with its pack."""
    child, pack = wasteful(store)
    copy = repack._copy

    def copy_less(store: Store, pack: Any, number: int) -> Any:
        moved = copy(store, pack, number)
        cut(store.disk.pack_path(number))
        return moved

    monkeypatch.setattr(repack, "_copy", copy_less)
    with pytest.raises(Internal, match=r"would be published before .*\(invariant 5\)"):
        repack.compact(store, lambda: True)
    assert store.list() == [child] and pack in store.pack_numbers()
    verify(store, child.id, Progress())


def test_an_image_that_cannot_be_published_is_never_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others, who may name the packs of all that they see, would name packs that are removed."""

    def fail(where: Point) -> None:
        if where is Point.MANIFEST_SYNC:
            assert store.list(), "it was renamed already"
            raise ZeroDivisionError

    monkeypatch.setattr("phosd.engine.image.writer.point", fail)
    with store.begin(0) as writer:
        image = fill(store, writer, CONTENT)
        with pytest.raises(ZeroDivisionError):
            writer.publish(image)
        assert store.list() == []
    assert everything(store.state) == set()
