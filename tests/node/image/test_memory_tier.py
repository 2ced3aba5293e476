"""The tier in memory: what is there is an image like any other, and on the disk afterwards."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from phosd.engine.digest import digest_buffer
from phosd.engine.image import private_files
from phosd.engine.image import write_back as write_back_module
from phosd.engine.image.manifest import CHUNK, Block, ChunkRef, Manifest, Tree
from phosd.engine.image.packs import HEADER, RECORD, header_fields, record_size
from phosd.engine.image.repack import compact
from phosd.engine.image.store import Store
from phosd.engine.image.tier import ExpectedSize, MemoryTier
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.system import memory_mount
from phosd.errors import Busy, Cancelled, NoSuchImage, NotAuthorized, OutOfSpace
from tests.support.harness import wait_until
from tests.support.samples import CRIU_FILES, everything, manifest_of, publish

ROOT = Path(__file__).parents[3]
CONTENT = bytes(range(256)) * 32 + b"\1" * CHUNK
SIZE = 4 << 20
"""What an image of this content takes at most."""
LIMIT = 10 << 20
"""Room for three images, of which each takes some 2 MiB, and not for one more that may take 4."""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "memory"
    assert memory_mount.mount(folder) == ""
    yield folder
    while folder.is_mount():
        assert memory_mount.unmount(folder) == ""


@pytest.fixture
def store(tmp_path: Path, memory: Path) -> Store:
    return Store(tmp_path / "state", memory=MemoryTier(memory, LIMIT))


def on_the_disk(store: Store) -> Store:
    """The store as it is when the machine has been started anew."""
    return Store(store.state)


def whole(store: Store, *images: Manifest) -> None:
    """There are these images, and every byte of them is right."""
    assert store.list() == [*images]
    for image in images:
        verify(store, image.id, Progress())


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def only_spares(memory: Path) -> bool:
    """Whether no image is in memory, and the packs of those that were there wait for others."""
    names = everything(memory)
    return bool(names) and all(name.endswith(".spare") for name in names)


def test_an_image_is_in_memory_and_then_on_the_disk_too(store: Store, memory: Path) -> None:
    manifest = publish(store, CONTENT, owner=1000, size=SIZE)
    whole(store, manifest)
    assert not store.is_durable(manifest.id)
    assert store.write_back.pending() == [manifest.id]
    assert everything(store.state) == set()
    assert on_the_disk(store).list() == []
    progress = Progress()
    store.write_back.write(manifest.id, progress)
    assert store.is_durable(manifest.id)
    assert store.write_back.pending() == []
    (phase,) = progress.phases
    assert phase.name == "write"
    assert phase.bytes_done == phase.bytes_total > len(CONTENT) + sum(map(len, CRIU_FILES.values()))
    whole(on_the_disk(store), manifest)
    assert everything(memory) == everything(store.state)
    for path in [*store.state.rglob("*"), memory, *memory.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    store.write_back.write(manifest.id, Progress())  # nothing to do
    store.delete(manifest.id)
    assert everything(store.state) == set()
    assert only_spares(memory)
    with pytest.raises(NoSuchImage):
        store.write_back.write(manifest.id, Progress())


def test_without_room_it_goes_to_the_disk(store: Store, memory: Path) -> None:
    large = publish(store, CONTENT, size=LIMIT + 1)
    assert store.is_durable(large.id)
    near = [publish(store, CONTENT, size=SIZE) for _ in range(2)]
    with store.begin(0, size=ExpectedSize(0, SIZE)):  # is going to take the rest
        far = publish(store, CONTENT, size=SIZE)
    assert [store.is_durable(each.id) for each in (*near, far)] == [False, False, True]
    whole(store, large, *near, far)


def test_copies_make_room_the_oldest_first(store: Store, memory: Path) -> None:
    first, second, third = (publish(store, CONTENT, size=SIZE) for _ in range(3))
    store.write_back.write(second.id, Progress())
    store.write_back.write(third.id, Progress())
    with store.open(second.id):  # it is being read
        fourth = publish(store, CONTENT, size=SIZE)
    assert {each.name for each in (memory / "images").iterdir()} == {
        first.id,
        second.id,
        fourth.id,
    }
    fifth = publish(store, CONTENT, size=SIZE)
    assert store.write_back.pending() == [first.id, fourth.id, fifth.id]
    assert len(files(memory / "packs")) == 3
    whole(store, first, second, third, fourth, fifth)


def child(store: Store, parent: Manifest) -> Manifest:
    """An image in memory whose chunks are all in the packs of another."""
    with store.begin(0, size=ExpectedSize(0, SIZE)) as writer:
        trees = [msgspec.structs.replace(tree, files=()) for tree in parent.trees]
        manifest = manifest_of(writer, [parent.blocks[0]], trees)
        writer.publish(manifest)
    return manifest


def test_a_child_is_written_with_the_packs_of_its_parent(store: Store, memory: Path) -> None:
    parent = publish(store, CONTENT, size=SIZE)
    of_parent = child(store, parent)
    store.write_back.write(of_parent.id, Progress())
    whole(on_the_disk(store), of_parent)
    store.delete(parent.id)
    whole(store, of_parent)
    store.delete(of_parent.id)
    assert everything(store.state) == set()
    assert only_spares(memory)


def test_a_child_outlives_the_copy_of_its_parent(store: Store, memory: Path) -> None:
    parent = publish(store, CONTENT, size=SIZE)
    store.write_back.write(parent.id, Progress())
    of_parent = child(store, parent)
    others = [publish(store, CONTENT, size=SIZE) for _ in range(3)]
    assert not (memory / "images" / parent.id).exists()
    whole(store, parent, of_parent, *others)
    for image in (of_parent, *others):
        store.write_back.write(image.id, Progress())
    whole(on_the_disk(store), parent, of_parent, *others)


def test_a_pack_goes_from_one_image_to_the_next(store: Store, memory: Path) -> None:
    """What the first had left in it does not get to the disk with the second."""
    with store.begin(0, size=ExpectedSize(0, SIZE)) as writer:
        store.spares.preallocate(2 * CHUNK, writer.tier)
        (pack,) = writer.packs(2)
        file, size = os.fstat(pack.fd).st_ino, os.fstat(pack.fd).st_size
        assert size == 2 * RECORD
        os.pwrite(pack.fd, b"old" * (size // 3), 0)
    assert only_spares(memory)  # it was aborted
    with store.begin(0, size=ExpectedSize(0, SIZE)) as writer:
        store.spares.preallocate(CHUNK, writer.tier)
        (pack,) = writer.packs(1)
        assert (os.fstat(pack.fd).st_ino, os.fstat(pack.fd).st_size) == (file, size)
        chunk = b"new!" * 1024
        digest = digest_buffer(store.key, chunk)[0]
        record = header_fields(writer.id, 0, digest, len(chunk)).ljust(HEADER, b"\0") + chunk
        os.pwrite(pack.fd, record.ljust(record_size(len(chunk)), b"\0"), 0)
        place = ChunkRef(digest.hex(), pack.number, 0, len(chunk))
        block = Block(0, 1, 0x7F0000000000, len(chunk), 0, (place,))
        manifest = manifest_of(writer, [block], [Tree(7, "criu-0", ())])
        writer.publish(manifest)
    assert (memory / "packs" / f"{pack.number}.pack").stat().st_size == size
    whole(store, manifest)
    store.write_back.write(manifest.id, Progress())
    (copy,) = (store.state / "packs").iterdir()
    assert copy.stat().st_size == record_size(len(chunk))
    whole(on_the_disk(store), manifest)
    with store.open(manifest.id):  # its pack is read, perhaps for another image that names it
        for tier in store.tiers:
            assert not private_files.unused(tier.pack_path(pack.number)) or tier is store.disk
    store.delete(manifest.id)
    assert [path.stat().st_ino for path in (memory / "packs").iterdir()] == [file]


def test_who_deletes_an_image_does_not_wait_for_its_writing(
    store: Store, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish(store, CONTENT, size=SIZE)
    monkeypatch.setattr(write_back_module, "_PIECE", 4096)
    deleted, began = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def slowly(_: Progress) -> None:
        began.set()
        wait_until(lambda: manifest.id in store.write_back._unwanted, "somebody to delete it")

    def write() -> None:
        try:
            store.write_back.write(manifest.id, Progress(observer=slowly))
        except NoSuchImage as error:
            failures.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    assert began.wait(60)
    store.delete(manifest.id)
    deleted.set()
    writing.join()
    assert len(failures) == 1
    assert everything(store.state) == set()
    assert only_spares(memory)


def test_a_reader_keeps_an_image_that_is_only_in_memory(store: Store) -> None:
    manifest = publish(store, CONTENT, size=SIZE)
    with store.open(manifest.id), pytest.raises(Busy, match="being read"):
        store.delete(manifest.id)
    whole(store, manifest)


def test_a_note_goes_to_the_disk_with_its_image(store: Store, memory: Path) -> None:
    """What is on the disk is what counts from then on, also while there is a copy in memory."""
    manifest = publish(store, CONTENT, size=SIZE)
    store.set_note(manifest.id, "  before the rate went up: ε = 0.1 ")
    noted = {manifest.id: "before the rate went up: ε = 0.1"}
    assert store.notes() == noted
    assert everything(store.state) == set()
    store.write_back.write(manifest.id, Progress())
    assert store.notes() == on_the_disk(store).notes() == noted
    store.set_note(manifest.id, "after")
    assert store.notes() == on_the_disk(store).notes() == {manifest.id: "after"}
    whole(on_the_disk(store), manifest)
    store.set_note(manifest.id, "")
    assert store.notes() == on_the_disk(store).notes() == {}
    store.set_note(manifest.id, "gone with it")
    store.delete(manifest.id)
    assert store.notes() == {}
    with pytest.raises(NoSuchImage):
        store.set_note(manifest.id, "of nothing")
    assert everything(store.state) == set()


WRITE = """
    import sys
    from pathlib import Path
    from phosd.engine.image.store import Store
    from phosd.engine.image.tier import ExpectedSize, MemoryTier
    from phosd.engine.job.progress import Progress
    store = Store(Path(sys.argv[1]), memory=MemoryTier(Path(sys.argv[2]), 1 << 30))
    store.write_back.write(sys.argv[3], Progress())
"""


@pytest.mark.parametrize("fault", ["write-back-pack", "write-back-manifest"])
@pytest.mark.parametrize("kind", ["kill", "enospc", "raise"])
def test_a_failing_writing_leaves_it_in_memory(
    store: Store, memory: Path, fault: str, kind: str
) -> None:
    kept = publish(store, CONTENT)
    before = everything(store.state)
    manifest = publish(store, CONTENT, size=SIZE)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITE), store.state, memory, manifest.id],
        cwd=ROOT,
        env=os.environ | {"PHOS_FAULT": f"{fault}:{kind}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (-9 if kind == "kill" else 1), done.stderr
    if kind == "enospc":
        assert "OutOfSpace" in done.stderr.splitlines()[-1]
    assert store.write_back.pending() == [manifest.id]
    assert on_the_disk(store).list() == [kept]
    store.sweep()
    left = everything(store.state) - before
    assert not [name for name in left if not name.endswith(".pack")], (
        "a pack that is whole may stay"
    )
    store.write_back.write(manifest.id, Progress())
    whole(on_the_disk(store), kept, manifest)
    store.delete(manifest.id)
    assert everything(store.state) == before


def test_what_a_killed_phosd_began_on_the_disk_is_gone_after_a_restart(
    store: Store, memory: Path
) -> None:
    """The memory, too, if the machine ended."""
    manifest = publish(store, CONTENT, size=SIZE)
    arguments = map(str, (store.state, memory, manifest.id))
    environment = os.environ | {"PHOS_FAULT": "write-back-manifest:kill", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITE), *arguments], env=environment, check=False
    )
    assert everything(store.state)
    assert memory_mount.unmount(memory) == ""
    anew = on_the_disk(store)
    assert anew.list() == []
    assert anew.sweep()
    assert everything(store.state) == set()


def test_a_cancelled_writing_leaves_it_in_memory(store: Store) -> None:
    manifest = publish(store, CONTENT, size=SIZE)
    progress = Progress()
    progress.cancel()
    with pytest.raises(Cancelled):
        store.write_back.write(manifest.id, progress)
    assert everything(store.state) == set()
    whole(store, manifest)


def test_the_memory_is_taken_away(store: Store, memory: Path) -> None:
    durable, lost = (publish(store, CONTENT, size=SIZE) for _ in range(2))
    store.write_back.write(durable.id, Progress())
    assert memory_mount.unmount(memory) == ""
    whole(store, durable)
    assert store.write_back.pending() == []
    with pytest.raises(NoSuchImage):
        store.get(lost.id)
    later = publish(store, CONTENT, size=SIZE)
    assert store.is_durable(later.id)
    assert store.sweep() == []
    whole(store, durable, later)


def test_the_memory_comes_back(store: Store, memory: Path) -> None:
    """What was done without it does not mix with what is in it."""
    near = publish(store, CONTENT, size=SIZE)
    without = Store(store.state)  # of a phosd that was told to do without
    far = publish(without, CONTENT[::-1])
    both = sorted((near, far), key=lambda image: image.id)
    again = Store(store.state, memory=MemoryTier(memory, LIMIT))
    whole(again, *both)
    again.write_back.write(near.id, Progress())
    whole(on_the_disk(again), *both)
    later = publish(again, CONTENT, size=SIZE)
    hidden = again._memory
    assert hidden is not None and not again.is_durable(later.id)
    hidden._device += 1  # as if something else were mounted there
    assert again.list() == both
    hidden._device -= 1
    assert again.list() == both, "it is left alone until phosd is started again"
    whole(Store(store.state, memory=MemoryTier(memory, LIMIT)), *both, later)


def test_the_memory_of_another_store_is_left_alone(
    store: Store, memory: Path, tmp_path: Path
) -> None:
    manifest = publish(store, CONTENT, size=SIZE)
    other = Store(tmp_path / "other", memory=MemoryTier(memory, LIMIT))
    assert other.list() == []
    assert other.sweep() == []
    assert other.is_durable(publish(other, CONTENT, size=SIZE).id)
    whole(store, manifest)


def test_without_room_for_more_it_is_emptied(store: Store, memory: Path) -> None:
    manifest = publish(store, CONTENT, size=SIZE)
    emptied = Store(store.state, memory=MemoryTier(memory, 0))
    assert emptied.is_durable(publish(emptied, CONTENT, size=SIZE).id)
    assert emptied.write_back.pending() == [manifest.id]
    assert emptied.write_back.pending_bytes() > len(CONTENT)
    emptied.write_back.write(manifest.id, Progress())
    assert emptied.write_back.pending_bytes() == 0


def test_it_is_written_while_it_is_restored(store: Store, memory: Path) -> None:
    """CRIU's files are lent to the image's owner then, to read."""
    manifest = publish(store, CONTENT, owner=1000, size=SIZE)
    folder = memory / "images" / manifest.id / "criu-0"
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 0, 1000)
        path.chmod(0o750 if path.is_dir() else 0o640)
    store.write_back.write(manifest.id, Progress())
    whole(on_the_disk(store), manifest)
    later = publish(store, CONTENT, owner=1000, size=SIZE)
    (memory / "images" / later.id / "criu-0" / "core-7.img").chmod(0o660)
    with pytest.raises(NotAuthorized, match=r"core-7\.img"):  # others could have written to it
        store.write_back.write(later.id, Progress())


def test_a_copy_that_is_dropped_while_it_is_looked_for(
    store: Store, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish(store, CONTENT, size=SIZE)
    store.write_back.write(manifest.id, Progress())
    folders = [memory / "images" / manifest.id, store.disk.images / manifest.id]
    dropped = store.memory
    assert dropped is not None
    dropped.drop(manifest.id)
    monkeypatch.setattr(store, "image_folder", lambda _: folders.pop(0))
    assert store.get(manifest.id) == manifest


def test_spare_packs_make_room_for_files(store: Store, memory: Path) -> None:
    """They are no room for what goes to other files."""
    store.spares.preallocate(3 * CHUNK, MemoryTier(memory, LIMIT))
    with store.begin(0, size=ExpectedSize(6 << 20, 0)) as writer:
        assert writer.tier is store.memory
        assert list((memory / "packs").glob("*.spare")) == []


def test_another_store_finds_it(store: Store, memory: Path) -> None:
    """As a phosd that is started again does."""
    manifest = publish(store, CONTENT, size=SIZE)
    again = Store(store.state, memory=MemoryTier(memory, LIMIT))
    assert again.sweep() == []
    assert again.write_back.pending() == [manifest.id]
    whole(again, manifest)


def test_packs_are_not_rewritten_under_an_image_in_memory(store: Store, memory: Path) -> None:
    parent = publish(store, CONTENT + b"\2" * (2 * CHUNK), size=SIZE * 2)
    store.write_back.write(parent.id, Progress())
    with store.begin(0, size=ExpectedSize(0, SIZE)) as writer:
        block = parent.blocks[0]
        small = msgspec.structs.replace(block, size=block.chunks[0].length, chunks=block.chunks[:1])
        trees = [msgspec.structs.replace(tree, files=()) for tree in parent.trees]
        manifest = manifest_of(writer, [small], trees)
        writer.publish(manifest)
    store.delete(parent.id)
    assert compact(store, lambda: True) == 0
    whole(store, manifest)
    store.write_back.write(manifest.id, Progress())
    assert memory_mount.unmount(memory) == ""
    assert compact(store, lambda: True) > 0
    whole(store, store.get(manifest.id))


def test_the_disk_is_full(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = publish(store, CONTENT, size=SIZE)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(OutOfSpace, match=f"image {manifest.id}.*No space"):
        store.write_back.write(manifest.id, Progress())
    assert everything(store.state) == set()
    whole(store, manifest)
