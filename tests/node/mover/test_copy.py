"""Passes of pre-copy: chunks copied while they change, and copied again over their earlier copy."""

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.digest import digest_buffer
from phosd.engine.image.manifest import CHUNK, Block, Tree
from phosd.engine.image.packs import RECORD
from phosd.engine.image.store import ImageWriter, Store
from phosd.engine.image.verify import verify
from phosd.engine.image.writer import Pack
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.requests import Copies
from phosd.engine.system.cuda import is_software
from phosd.errors import Cancelled, Internal, OutOfMemory, OutOfSpace, PhosError
from tests.node.mover import owner
from tests.node.mover.owner import Owner
from tests.support.samples import everything, manifest_of

RING = 8 * RECORD
SIZES = [3 * CHUNK, 5 * CHUNK]
EVERY = [(10 + block, i) for block, size in enumerate(SIZES) for i in range(size // CHUNK)]


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store on a disk, and one on a tmpfs, where packs are pinned."""
    if request.param == "disk":
        yield Store(tmp_path / "state")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Store(Path(folder) / "state")


@pytest.fixture
def program() -> Iterator[Owner]:
    with owner.running() as process:
        yield process


def adopted(program: Owner, mover: Mover) -> list[bytearray]:
    """Random contents of the program's blocks, which the mover has as keys 10 and 11."""
    chance = random.Random(5)
    data = [bytearray(chance.randbytes(size)) for size in SIZES]
    descriptors = program.create(SIZES)
    mover.adopt([(10 + i, size, descriptors[i]) for i, size in enumerate(SIZES)])
    for index, content in enumerate(data):
        program.write(index, bytes(content))
    for fd in descriptors:
        os.close(fd)
    return data


def change(program: Owner, data: list[bytearray], block: int, index: int) -> None:
    """Write into a chunk."""
    at = index * CHUNK + 4321
    data[block][at] ^= 1
    program.write(block, bytes([data[block][at]]), offset=at)


def digests_of(store: Store, data: list[bytearray]) -> dict[tuple[int, int], bytes]:
    """What the CPU says."""
    return {
        (10 + block, index): digest
        for block, content in enumerate(data)
        for index, digest in enumerate(digest_buffer(store.key, bytes(content)))
    }


def packs_of(writer: ImageWriter, mover: Mover) -> tuple[list[Pack], int]:
    """Packs for all chunks, pinned if they lie in memory."""
    packs = writer.packs(len(EVERY))
    return packs, mover.pin(pack.fd for pack in packs)


@pytest.mark.parametrize("pinned_after", [0, 1], ids=["pinned first", "pinned between the passes"])
def test_a_later_pass_replaces_what_it_copies_again(
    pinned_after: int, program: Owner, store: Store
) -> None:
    store.spares.preallocate(64 << 20)
    with Mover.start(0, RING, store.key) as mover:
        data = adopted(program, mover)
        with store.begin(0) as writer:
            progress = Progress()
            progress.phase("copy")
            packs = writer.packs(len(EVERY))
            pins = [mover.pin(pack.fd for pack in packs)] if pinned_after == 0 else []
            copies = Copies(writer, packs)
            first = mover.copy(EVERY[1:], copies, progress)
            assert first == {k: d for k, d in digests_of(store, data).items() if k != EVERY[0]}
            before = dict(copies.refs)
            pins += [mover.pin(pack.fd for pack in packs)] if pinned_after == 1 else []
            for block, index in ((0, 2), (1, 0), (1, 1), (1, 4)):
                change(program, data, block, index)
            again = [(11, 4), (10, 2), (11, 1), (11, 0), (11, 1), (10, 0)]
            second = mover.copy(again, copies, progress)
            now = digests_of(store, data)
            assert second == {chunk: now[chunk] for chunk in again}
            assert {k: (r.pack, r.offset) for k, r in copies.refs.items() if k in before} == {
                k: (r.pack, r.offset) for k, r in before.items()
            }
            assert {k: bytes.fromhex(r.digest) for k, r in copies.refs.items()} == now
            assert progress.phases[0].bytes_done == (7 + 5) * CHUNK
            assert mover.copy([], copies) == {}
            blocks = [
                Block(0, 10 + b, (10 + b) << 32, size, 0, chunks)
                for b, size in enumerate(SIZES)
                if (chunks := tuple(copies.refs[k] for k in EVERY if k[0] == 10 + b))
            ]
            mover.unpin(pins[0])
            made = manifest_of(writer, blocks, [Tree(7, "criu-0", ())])
            writer.publish(made)
        verify(store, made.id, Progress())
        assert (store.disk.packs / "0.pack").stat().st_size == len(EVERY) * RECORD
        fresh = mover.create([(100 + b, size) for b, size in enumerate(SIZES)])
        with store.open(made.id) as image:
            mover.load({100 + b: block.chunks for b, block in enumerate(made.blocks)}, image)
        program.attach(fresh, SIZES)
        assert [program.read(2 + b) for b in range(2)] == data
        for fd in fresh:
            os.close(fd)


def test_memory_in_the_hosts_ram(program: Owner, tmp_path: Path) -> None:
    """It is saved and loaded like a GPU's, and what is made for it is in the host's RAM again."""
    store = Store(tmp_path / "state")
    with Mover.start(0, RING, store.key) as mover, store.begin(0) as writer:
        adopted(program, mover)
        copies = Copies(writer, writer.packs(2))
        mover.copy(EVERY, copies)
        chunks = [tuple(copies.refs[k] for k in EVERY if k[0] == key) for key in (10, 11)]
        blocks = [
            Block(0, key, key << 32, size, 0, chunks[key - 10], host=key == 10)
            for key, size in zip((10, 11), SIZES, strict=True)
        ]
        made = manifest_of(writer, blocks, [Tree(7, "criu-0", ())])
        writer.publish(made)
        fresh = mover.create([(100, SIZES[0]), (101, SIZES[1])], host=[100])
        if is_software():
            names = [Path(f"/proc/self/fd/{fd}").readlink().name for fd in fresh]
            assert ["-host" in name for name in names] == [True, False]
        with store.open(made.id) as image:
            mover.load({100 + b: block.chunks for b, block in enumerate(made.blocks)}, image)
        digests = mover.digest([10, 11, 100, 101])
        assert (digests[100], digests[101]) == (digests[10], digests[11])
        for fd in fresh:
            os.close(fd)


def test_passes_take_more_packs_when_they_need_them(program: Owner, tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    with Mover.start(0, RING, store.key) as mover, store.begin(0) as writer:
        data = adopted(program, mover)
        small = [Pack(p.number, p.fd, capacity=2 * RECORD + 7) for p in writer.packs(1)]
        copies = Copies(writer, small)
        assert mover.copy(EVERY[:1], copies) | mover.copy(EVERY, copies) == digests_of(store, data)
        places = {(ref.pack, ref.offset) for ref in copies.refs.values()}
        assert len(places) == len(EVERY)
        assert max(offset for pack, offset in places if pack == 0) == RECORD


@pytest.mark.parametrize(
    ("fault", "error"),
    [("mover-write:2:enospc", OutOfSpace), ("mover-copy-out:3", Internal)],
)
def test_a_failing_pass_leaves_nothing(
    program: Owner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[PhosError],
) -> None:
    store = Store(tmp_path / "state")
    monkeypatch.setenv("PHOS_FAULT", fault)
    with Mover.start(0, RING, store.key) as mover:
        data = adopted(program, mover)
        with pytest.raises(error), store.begin(0) as writer:
            mover.copy(EVERY, Copies(writer))
        assert everything(store.state) == set()
        with store.begin(0) as writer:
            assert mover.copy(EVERY, Copies(writer)) == digests_of(store, data)


def test_what_cannot_be_copied(program: Owner, tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    with Mover.start(0, RING, store.key) as mover:
        adopted(program, mover)
        with store.begin(0) as writer:
            with pytest.raises(Internal, match="holds no block 12"):
                mover.copy([(12, 0)], Copies(writer))
            with pytest.raises(Internal, match="no chunk 3"):
                mover.copy([(10, 3)], Copies(writer))
            progress = Progress()
            progress.phase("copy")
            progress.cancel()
            with pytest.raises(Cancelled):
                mover.copy(EVERY, Copies(writer), progress)
                progress.check()


def test_memory_of_the_movers_own_goes_out_as_it_lies(program: Owner, store: Store) -> None:
    """A copy within the device, saved without being hashed again; it is dropped as it is saved."""
    store.spares.preallocate(64 << 20)
    with Mover.start(0, 3 * RECORD, store.key) as mover:
        data = adopted(program, mover)
        digests = digests_of(store, data)
        before = mover.free_memory()[0]
        mover.create_together([(20 + b, size) for b, size in enumerate(SIZES)])
        assert mover.free_memory()[0] == before - sum(SIZES)
        mover.fetch({20: (10, [0, 1, 2]), 21: (11, [0, 1, 3, 4])})
        proven = {(key + 10, i): digests[key, i] for key, i in EVERY if (key, i) != (11, 2)}
        for block in range(2):
            change(program, data, block, 0)  # the copy is what it was
        gone: list[int] = []
        with store.begin(0) as writer:
            progress = Progress()
            progress.phase("copy")
            packs, pinned = packs_of(writer, mover)
            copies = Copies(writer, packs)
            copied = mover.copy(proven, copies, progress, proven=proven, let_go=gone.extend)
            assert copied == proven
            assert sorted(gone) == [20, 21]
            assert mover.free_memory()[0] == before
            assert progress.phases[0].bytes_done == 7 * CHUNK
            mover.unpin(pinned)
            blocks = [
                Block(0, 1, 1 << 32, SIZES[0], 0, tuple(copies.refs[20, i] for i in range(3)))
            ]
            made = manifest_of(writer, blocks, [Tree(7, "criu-0", ())])
            writer.publish(made)
        verify(store, made.id, Progress())
        with pytest.raises(Internal, match="holds no block 20"):
            mover.digest([20])


def test_blocks_made_together_go_together(tmp_path: Path) -> None:
    with Mover.start(0, RING, Store(tmp_path / "state").key) as mover:
        before = mover.free_memory()[0]
        sizes = [CHUNK + 3 * 4096, 4096, 2 * CHUNK]
        mover.create_together([])
        mover.create_together([(1 + n, size) for n, size in enumerate(sizes)])
        taken = before - mover.free_memory()[0]
        assert taken >= sum(sizes)
        assert [len(d) for d in mover.digest([1, 2, 3]).values()] == [2, 1, 2]
        with pytest.raises(Internal, match="already holds a block 2"):
            mover.create_together([(8, CHUNK), (2, CHUNK)])
        with pytest.raises(OutOfMemory):
            mover.create_together([(8, CHUNK), (9, before)])
        with pytest.raises(Internal, match="holds no block 8"):
            mover.digest([8])
        mover.drop([3, 1])
        assert mover.free_memory()[0] == before - taken
        mover.drop([2])
        assert mover.free_memory()[0] == before
