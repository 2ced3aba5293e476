"""What is equal in the images of a user is stored once, and no image depends on another."""

import filecmp
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from phosd.engine.digest import digest_buffer
from phosd.engine.image.cpu_manifest import WRITTEN
from phosd.engine.image.manifest import CHUNK, Block, ChunkRef, Manifest, Tree
from phosd.engine.image.packs import RECORD
from phosd.engine.image.repack import compact
from phosd.engine.image.store import ImageWriter, Store, packs_of
from phosd.engine.image.tier import ExpectedSize, MemoryTier
from phosd.engine.image.usage import SharedChunks, Usage
from phosd.engine.image.verify import verify
from phosd.engine.image.writer import Pack
from phosd.engine.job.progress import Progress
from phosd.errors import ImageCorrupt
from tests.support.samples import append, everything, manifest_of

USER = 1000
IN_MEMORY = ExpectedSize(0, CHUNK)


class Roomy(MemoryTier):
    """A tier in a plain folder."""

    def has_room(self, files: int, chunks: int, others: int) -> bool:
        return True


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


@pytest.fixture
def tiered(tmp_path: Path) -> Store:
    return Store(tmp_path / "state", memory=Roomy(tmp_path / "memory", 1 << 40))


def fill(store: Store, writer: ImageWriter, values: Sequence[int]) -> Manifest:
    """Store chunks of these bytes as a checkpoint does: those that the owner lacks."""
    packs: list[Pack] = []

    def place(value: int) -> ChunkRef:
        chunk = bytes([value]) * CHUNK
        ref = writer.find(digest_buffer(store.key, chunk)[0].hex())
        if ref is None:
            packs[:] = packs or writer.packs(1)
            ref = append(store, writer, packs[0], chunk)
            writer.add([ref])
        return ref

    chunks = tuple(map(place, values))
    block = Block(0, 1, 0x7F0000000000, CHUNK * len(values), 0, chunks)
    (writer.folder / "criu-0").mkdir(exist_ok=True)
    return manifest_of(writer, [block], [Tree(7, "criu-0", ())])


def publish(
    store: Store, *values: int, owner: int = USER, size: ExpectedSize | None = None
) -> Manifest:
    with store.begin(owner, size=size) as writer:
        manifest = fill(store, writer, values)
        writer.publish(manifest)
    return manifest


def whole(store: Store, *images: Manifest) -> None:
    """There are these images, and every byte of them is right."""
    assert [image.id for image in store.list()] == [image.id for image in images]
    for image in images:
        verify(store, image.id, Progress())


def sizes(store: Store) -> dict[int, int]:
    return {n: store.pack_path(n).stat().st_size for n in store.pack_numbers()}


def damage(store: Store, ref: ChunkRef) -> None:
    with store.pack_path(ref.pack).open("r+b") as pack:
        pack.seek(ref.offset + 4096 + 100)
        pack.write(b"x")


def test_equal_chunks_of_a_user_are_stored_once(store: Store) -> None:
    first, second = publish(store, 1, 2, 3), publish(store, 3, 2, 4)
    stranger = publish(store, 1, 2, 3, owner=USER + 1)
    assert sizes(store) == {0: 3 * RECORD, 1: RECORD, 2: 3 * RECORD}
    assert Usage([first, second]).total == store.taken(USER) == 4 * CHUNK
    whole(store, first, second, stranger)
    store.delete(first.id)
    whole(store, second, stranger)
    assert [*sizes(store)] == [0, 1, 2]
    store.delete(second.id)
    assert [*sizes(store)] == [2]
    # Nothing is known any more of chunks that are gone.
    whole(store, stranger, publish(store, 1, 2, 3))


def test_what_an_unfinished_image_may_name_stays(store: Store) -> None:
    first = publish(store, 1, 2, 3, 4, 5)
    with store.begin(USER) as writer:
        store.delete(first.id)
        assert compact(store, lambda: True) == 0
        assert [*sizes(store)] == [0]
        second = fill(store, writer, [5])
        writer.publish(second)
    with store.begin(USER) as aborted:
        third = publish(store, 5, 6)
        store.delete(second.id)
        assert compact(store, lambda: True) == 0  # it may still name what the third needs, too
        # The third is younger than this writer, which has no hold on its pack.
        assert packs_of(fill(store, aborted, [5, 6])).isdisjoint(packs_of(third) - {0})
    whole(store, third)
    assert compact(store, lambda: True) == 4 * RECORD
    whole(store, store.get(third.id))
    # The chunk is found where it is now.
    again = publish(store, 5, 6)
    assert packs_of(again) == packs_of(store.get(third.id))
    for image in (third, again):
        store.delete(image.id)
    assert everything(store.state) == set()


def test_what_an_aborted_image_alone_has_kept_is_removed(store: Store) -> None:
    first = publish(store, 1)
    with store.begin(USER) as writer:
        store.delete(first.id)
        fill(store, writer, [1, 2])
    assert everything(store.state) == set()


def test_a_damaged_pack_is_shared_no_more(store: Store) -> None:
    first = publish(store, 1, 2)
    damage(store, first.blocks[0].chunks[1])
    second = publish(store, 1, 2)
    for image in (first, second):  # each says so, whoever has stored the chunk
        with pytest.raises(ImageCorrupt, match="other bytes than were saved"):
            verify(store, image.id, Progress())
    third = publish(Store(store.state), 1, 2)
    verify(store, third.id, Progress())
    assert packs_of(third).isdisjoint(packs_of(first))
    for image in (first, second):
        store.delete(image.id)
    whole(store, third, publish(store, 1, 2))
    assert not [*store.disk.packs.glob("*.damaged")]


@pytest.mark.parametrize("lost", ["tail", "header"])
def test_a_pack_that_is_not_what_it_was_is_not_shared(store: Store, lost: str) -> None:
    first = publish(store, 1, 2)
    path = store.pack_path(0)
    with path.open("r+b") as pack:
        if lost == "tail":
            pack.truncate(2 * RECORD - 1)
        else:
            pack.write(bytes(4096))
    second = publish(Store(store.state), 1, 2)
    assert packs_of(second).isdisjoint(packs_of(first))
    verify(store, second.id, Progress())


def test_an_image_is_durable_only_if_all_of_its_packs_are(tiered: Store) -> None:
    near = publish(tiered, 1, 2, size=IN_MEMORY)
    far = publish(tiered, 2, 3)
    child = publish(tiered, 1, 2, 3, 4, size=IN_MEMORY)
    assert packs_of(child) == {0, 1, 2}
    assert [tiered.is_durable(each.id) for each in (near, far, child)] == [False, True, False]
    whole(Store(tiered.state), far)  # of the one in memory nothing is left after a power cut
    tiered.write_back.write(child.id, Progress())
    whole(Store(tiered.state), far, child)
    tiered.delete(near.id)
    tiered.delete(far.id)
    whole(tiered, child)
    whole(Store(tiered.state), child)


def test_what_goes_to_the_disk_is_enough_for_unfinished_images(tiered: Store) -> None:
    """The last chunk of the first is needed by nobody but the one that is just being made."""
    first = publish(tiered, 1, 2, 3, size=IN_MEMORY)
    second = publish(tiered, 1, size=IN_MEMORY)
    with tiered.begin(USER, size=IN_MEMORY) as writer:
        tiered.delete(first.id)
        tiered.write_back.write(second.id, Progress())
        third = fill(tiered, writer, [3])
        writer.publish(third)
    tiered.write_back.write(third.id, Progress())
    whole(Store(tiered.state), second, third)


def test_what_nobody_needs_any_more_may_not_be_on_the_disk(tiered: Store) -> None:
    """The first was known when another image was begun, and is gone when its pack is copied."""
    first = publish(tiered, 1, 2, 3, size=IN_MEMORY)
    second = publish(tiered, 2, size=IN_MEMORY)
    tiered.delete(first.id)
    tiered.write_back.write(second.id, Progress())
    third = publish(tiered, 1, 3)
    whole(tiered, second, third)
    whole(Store(tiered.state), second, third)
    assert packs_of(third) > packs_of(second), "the first record is before one that is needed"


DELETE = """
import sys
from pathlib import Path
from phosd.engine.image.store import Store
Store(Path(sys.argv[1])).delete(sys.argv[2])
"""


@pytest.mark.parametrize("fault", ["delete-manifest", "delete-folder", "delete-pack"])
def test_a_kill_while_one_is_deleted_costs_the_other_nothing(store: Store, fault: str) -> None:
    first, second, lonely = publish(store, 1, 2), publish(store, 2, 4), publish(store, 5)
    for image in (first, lonely):
        killed = subprocess.run(
            [sys.executable, "-c", DELETE, str(store.state), image.id],
            env=os.environ | {"PHOS_FAULT": f"{fault}:1:kill"},
            check=False,
        )
        # The packs of the first are needed by the second.
        assert killed.returncode == (0 if image is first and fault == "delete-pack" else -9)
    again = Store(store.state)
    again.sweep()
    for image in again.list():
        verify(again, image.id, Progress())
        if image.id != second.id:
            again.delete(image.id)
    whole(again, second)
    again.delete(second.id)
    assert everything(store.state) == set()


def test_only_what_an_older_image_has_is_shared_with_it(store: Store) -> None:
    """Not what is in the same pack."""
    images = [
        publish(store, 1, 2, 3),
        publish(store, 1, 4, 1),
        publish(store, 3),
        publish(store, 5),
    ]
    known = SharedChunks()
    assert known.of(images) == [b"\0\0\0", b"\1\0\1", b"\1", b""]
    assert known.of([*images]) is known.of(images)
    assert known.of(images[1:]) == [b"\0\0\0", b"\0", b""]


def test_bytes_are_counted_once_whatever_is_shared(store: Store) -> None:
    chance = random.Random(5)
    images = [publish(store, *chance.sample(range(12), chance.randint(1, 6))) for _ in range(12)]
    left = {image.id: image for image in images}

    def counted() -> int:
        chunks = [c for image in left.values() for block in image.blocks for c in block.chunks]
        return sum({(c.pack, c.offset): c.length for c in chunks}.values())

    usage = Usage(images)
    assert usage.total == counted() == store.taken(USER)
    for image in chance.sample(images, len(images)):
        before = counted()
        del left[image.id]
        assert usage.remove(image.id) == before - counted()
        assert usage.total == counted()


def with_files(store: Store, files: dict[str, bytes], owner: int = USER) -> Manifest:
    """An image in which a program's files of these contents are saved."""
    with store.begin(owner) as writer:
        written = writer.folder / "criu-0" / WRITTEN
        written.mkdir(parents=True)
        for name, content in files.items():
            (written / name).write_bytes(content)
        (written.parent / "pages-1.img").write_bytes(DATABASE)
        tree = Tree(7, "criu-0", writer.seal("criu-0", once=WRITTEN))
        manifest = manifest_of(writer, [], [tree])
        writer.publish(manifest)
    return manifest


def numbers(store: Store, image: Manifest) -> dict[str, int]:
    """The inodes of its files."""
    folder = store.disk.images / image.id / "criu-0"
    return {path.name: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


DATABASE, LOG = os.urandom(1 << 20), b"log"


def test_equal_files_of_a_users_images_are_kept_once(store: Store) -> None:
    """Whatever their names; CRIU's own files, which a restore lends to a user, are not."""
    first = with_files(store, {"0": DATABASE, "1": LOG})
    second = with_files(store, {"0": LOG, "1": LOG + b"more", "2": DATABASE})
    one, two = numbers(store, first), numbers(store, second)
    assert (two["0"], two["2"]) == (one["1"], one["0"])
    assert {two["1"], two["pages-1.img"]}.isdisjoint(one.values())
    store.delete(first.id)
    verify(store, second.id, Progress())
    third = with_files(store, {"0": DATABASE})
    assert numbers(store, third)["0"] == two["2"]


@pytest.mark.parametrize("why", ["of another user", "damaged", "deleted meanwhile"])
def test_a_file_is_not_shared(why: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = with_files(store, {"0": DATABASE})
    known = numbers(store, first)["0"]
    path = store.disk.images / first.id / "criu-0" / WRITTEN / "0"
    if why == "damaged":
        with path.open("r+b") as file:
            file.write(b"rotten")
    if why == "deleted meanwhile":
        compare = filecmp.cmp

        def delete(one: Path, other: Path, shallow: bool) -> bool:
            same = compare(one, other, shallow=shallow)
            store.delete(first.id)
            return same

        monkeypatch.setattr(filecmp, "cmp", delete)
    second = with_files(store, {"0": DATABASE}, USER + (why == "of another user"))
    monkeypatch.undo()
    verify(store, second.id, Progress())
    if why != "deleted meanwhile":
        assert numbers(store, second)["0"] != known
