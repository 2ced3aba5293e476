"""The data mover with a second process that owns the memory: what it adopts, saves and brings back.

Runs on whatever GPU the machine has, the software GPU included.
"""

import contextlib
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phosd.engine.digest import digest_buffer
from phosd.engine.image.manifest import CHUNK, Block, Manifest, Tree
from phosd.engine.image.packs import HEADER, RECORD
from phosd.engine.image.store import ImageWriter, Store
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client import rpc
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.requests import Saved
from phosd.errors import (
    Cancelled,
    ImageCorrupt,
    Internal,
    InvalidOption,
    OutOfMemory,
    OutOfSpace,
    PhosError,
    Timeout,
)
from tests.node.mover import owner
from tests.node.mover.owner import Owner
from tests.support.harness import wait_until
from tests.support.samples import everything, manifest_of

RING = 8 * RECORD
SIZES = [3 * CHUNK, CHUNK, 6 * CHUNK]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


@pytest.fixture
def program() -> Iterator[Owner]:
    with owner.running() as process:
        yield process


@pytest.fixture
def mover(store: Store) -> Iterator[Mover]:
    with Mover.start(0, RING, store.key) as process:
        yield process


def contents(seed: int = 1) -> list[bytes]:
    """Bytes for blocks of SIZES: random chunks, with equal ones and zeros among them."""
    chance = random.Random(seed)
    blocks = [chance.randbytes(size) for size in SIZES]
    zeros, first = bytes(CHUNK), blocks[0][:CHUNK]
    blocks[2] = blocks[2][:CHUNK] + zeros + zeros + first + blocks[2][4 * CHUNK :]
    return blocks


@contextlib.contextmanager
def filled(program: Owner, mover: Mover, data: list[bytes]) -> Iterator[None]:
    """The program's blocks hold ``data`` and the mover has adopted them as keys 10, 11, ..."""
    descriptors = program.create([len(d) for d in data])
    try:
        mover.adopt([(10 + i, len(d), descriptors[i]) for i, d in enumerate(data)])
        for index, content in enumerate(data):
            program.write(index, content)
        yield
    finally:
        for fd in descriptors:
            os.close(fd)


def manifest(writer: ImageWriter, saved: Saved) -> Manifest:
    blocks = [
        Block(0, key, key << 32, sum(c.length for c in chunks), 0, chunks)
        for key, chunks in saved.chunks.items()
    ]
    return manifest_of(writer, blocks, [Tree(7, "criu-0", ())])


def save(mover: Mover, store: Store, keys: list[int]) -> Manifest:
    """Digest, save and publish blocks of the mover."""
    digests = mover.digest(keys)
    with store.begin(0) as writer:
        saved = mover.save(digests, writer)
        assert saved.changed == []
        made = manifest(writer, saved)
        writer.publish(made)
    return made


def load(mover: Mover, program: Owner, store: Store, made: Manifest) -> list[bytes]:
    """Load an image into new memory; returns what the program sees there."""
    sizes = [block.size for block in made.blocks]
    keys = [100 + block.id for block in made.blocks]
    descriptors = mover.create(list(zip(keys, sizes, strict=True)))
    first = len(SIZES)
    try:
        with store.open(made.id) as image:
            plan = {k: b.chunks for k, b in zip(keys, made.blocks, strict=True)}
            mover.load(plan, image)
        program.attach(descriptors, sizes)
    finally:
        for fd in descriptors:
            os.close(fd)
    return [program.read(first + i) for i in range(len(sizes))]


def test_digests_are_the_cpus(program: Owner, mover: Mover, store: Store) -> None:
    data = contents()
    with filled(program, mover, data):
        digests = mover.digest([12, 10, 11])
        assert list(digests) == [12, 10, 11]
        for i, content in enumerate(data):
            assert digests[10 + i] == digest_buffer(store.key, content)
    assert mover.digest([]) == {}


def test_what_differs_is_counted_by_samples(program: Owner, mover: Mover) -> None:
    """Four chunks of one value, wherever they are; three of others; one that is half of each."""
    sizes = [6 * CHUNK, 2 * CHUNK]
    descriptors = program.create(sizes)
    mover.adopt([(10 + i, size, descriptors[i]) for i, size in enumerate(sizes)])
    for fd in descriptors:
        os.close(fd)
    chance = random.Random(3)
    program.write(0, b"\7" * (3 * CHUNK) + chance.randbytes(3 * CHUNK))
    program.write(1, b"\7" * (CHUNK + CHUNK // 2) + chance.randbytes(CHUNK // 2))
    assert mover.count_different([10]) == 4
    assert mover.count_different([10, 11]) == 5
    assert mover.count_different([]) == 0


def test_what_is_saved_comes_back(program: Owner, mover: Mover, store: Store) -> None:
    data = contents()
    with filled(program, mover, data):
        progress = Progress()
        progress.phase("drain", bytes_total=sum(SIZES))
        digests = mover.digest([10, 11, 12])
        with store.begin(1000) as writer:
            saved = mover.save(digests, writer, progress)
            made = manifest(writer, saved)
            writer.publish(made)
        assert saved.changed == []
        verify(store, made.id, Progress())
        distinct = {d for blob in digests.values() for d in blob}
        assert len(distinct) == sum(SIZES) // CHUNK - 2
        assert progress.phases[0].bytes_done == len(distinct) * CHUNK
        assert (store.disk.packs / "0.pack").stat().st_size == len(distinct) * RECORD
        for index in range(len(SIZES)):
            program.write(index, bytes(SIZES[index]))
        assert load(mover, program, store, made) == data


def test_blocks_are_loaded_as_they_are_created(program: Owner, mover: Mover, store: Store) -> None:
    """The first is filled before the last exists; a later one has a chunk of an earlier one."""
    data = contents()
    with filled(program, mover, data):
        made = save(mover, store, [10, 11, 12])
    new = [(100 + block.id, block.size) for block in made.blocks]
    plan = {100 + block.id: block.chunks for block in made.blocks}
    progress = Progress()
    progress.phase("load", bytes_total=sum(SIZES))
    with store.open(made.id) as image, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(mover.load, plan, image, progress, arriving=True)
        descriptors = mover.create(new[:1])
        done = progress.phases[0]
        wait_until(lambda: done.bytes_done == new[0][1], "the first block")
        assert not loading.done()
        descriptors += mover.create(new[1:])
        loading.result(60)
    assert done.bytes_done == sum(SIZES)
    program.attach(descriptors, [size for _, size in new])
    for descriptor in descriptors:
        os.close(descriptor)
    assert [program.read(len(SIZES) + i) for i in range(len(SIZES))] == data


def test_blocks_that_are_not_created_are_not_waited_for_for_ever(
    program: Owner, mover: Mover, store: Store
) -> None:
    with filled(program, mover, contents()):
        made = save(mover, store, [10])
    plan = {100: made.blocks[0].chunks}
    with store.open(made.id) as image:
        with pytest.raises(Internal, match="holds no block 100"):
            mover.load(plan, image)
        progress = Progress()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(mover.load, plan, image, progress, arriving=True)
            progress.cancel()
            with pytest.raises(Cancelled):
                loading.result(60)
    with pytest.raises(Internal, match="twice"):
        mover.create([(100, CHUNK), (100, CHUNK)])
    with pytest.raises(Internal, match="holds no block 100"):
        mover.digest([100])


def test_a_chunk_is_stored_once_in_an_image(program: Owner, mover: Mover, store: Store) -> None:
    with filled(program, mover, contents()):
        digests = mover.digest([10, 12])
        with store.begin(0) as writer:
            first = mover.save({10: digests[10]}, writer)
            second = mover.save({12: digests[12]}, writer)
            assert second.chunks[12][3] == first.chunks[10][0]
            assert second.chunks[12][1] == second.chunks[12][2]
            merged = Saved(first.chunks | second.chunks, [])
            made = manifest(writer, merged)
            writer.publish(made)
    verify(store, made.id, Progress())


def test_a_write_after_the_digest_is_found(program: Owner, mover: Mover, store: Store) -> None:
    data = contents()
    with filled(program, mover, data):
        digests = mover.digest([10, 11, 12])
        for index, at in ((0, 2 * CHUNK + 12345), (2, 6 * CHUNK - 1)):
            program.write(index, bytes([data[index][at] ^ 1]), offset=at)
        with store.begin(0) as writer:
            assert mover.save(digests, writer).changed == [(10, 2), (12, 5)]


@pytest.mark.parametrize("fault", ["mover-write:3:short", "mover-read:2:short"])
def test_short_transfers_are_completed(
    program: Owner, store: Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("PHOS_FAULT", fault)
    data = contents()
    with Mover.start(0, RING, store.key) as mover, filled(program, mover, data):
        made = save(mover, store, [10, 11, 12])
        verify(store, made.id, Progress())
        assert load(mover, program, store, made) == data


@pytest.mark.parametrize("point", ["mover-digest", "mover-copy-out:2", "mover-write:2"])
@pytest.mark.parametrize(
    ("kind", "error"), [("kill", Internal), ("raise", Internal), ("enospc", OutOfSpace)]
)
def test_a_failing_save_is_an_error_and_leaves_nothing(
    program: Owner,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    kind: str,
    error: type[PhosError],
) -> None:
    if kind == "enospc" and point != "mover-write:2":
        error = Internal  # a full disk where nothing is written is a broken assumption
    monkeypatch.setenv("PHOS_FAULT", f"{point}:{kind}")
    data = contents()
    with Mover.start(0, RING, store.key) as mover:
        monkeypatch.delenv("PHOS_FAULT")
        with filled(program, mover, data):
            with pytest.raises(error, match="status -9" if kind == "kill" else None):
                save(mover, store, [10, 11, 12])
            assert everything(store.state) == set()
            assert mover.alive == (kind != "kill")
            if kind == "kill":
                with pytest.raises(Internal, match="status -9"):
                    mover.digest([10])
            else:
                assert save(mover, store, [10, 11, 12]).blocks[0].size == SIZES[0]
    assert program.read(0) == data[0]


@pytest.mark.parametrize("kind", ["kill", "raise", "enospc"])
@pytest.mark.parametrize("point", ["mover-read:2", "mover-copy-in"])
def test_a_failing_load_is_an_error(
    program: Owner,
    mover: Mover,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    kind: str,
) -> None:
    data = contents()
    with filled(program, mover, data):
        made = save(mover, store, [10, 11, 12])
    monkeypatch.setenv("PHOS_FAULT", f"{point}:{kind}")
    with Mover.start(0, RING, store.key) as faulty:
        with pytest.raises(Internal):
            load(faulty, program, store, made)
        assert faulty.alive == (kind != "kill")
    verify(store, made.id, Progress())
    assert load(mover, program, store, made) == data


def test_a_mover_killed_from_outside_is_noticed(program: Owner, mover: Mover, store: Store) -> None:
    data = contents()
    with filled(program, mover, data):
        os.kill(mover.pid, signal.SIGKILL)
        with pytest.raises(Internal, match="status -9"):
            mover.digest([10])
        assert not mover.alive
        with Mover.start(0, RING, store.key) as another:
            descriptors = program.create([CHUNK])
            another.adopt([(1, CHUNK, descriptors[0])])
            program.write(3, data[1])
            assert another.digest([1])[1] == digest_buffer(store.key, data[1])
            os.close(descriptors[0])


def test_a_cancelled_save_ends_soon_and_the_mover_goes_on(program: Owner, store: Store) -> None:
    progress = Progress()
    progress.phase("drain")
    progress.observer = lambda p: p.cancel() if p.phases[-1].bytes_done else None
    with Mover.start(0, 2 * RECORD, store.key) as mover, filled(program, mover, contents()):
        digests = mover.digest([10, 11, 12])
        with pytest.raises(Cancelled), store.begin(0) as writer:
            mover.save(digests, writer, progress)
            progress.check()
        assert everything(store.state) == set()
        assert progress.phases[0].bytes_done <= sum(SIZES)
        verify(store, save(mover, store, [10, 11, 12]).id, Progress())


def test_a_mover_that_hangs_is_ended(
    program: Owner, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOS_FAULT", "mover-copy-out:hang")
    with Mover.start(0, RING, store.key) as mover, filled(program, mover, contents()):
        monkeypatch.setattr(rpc, "SILENCE_SECONDS", 2.0)
        with pytest.raises(Timeout, match="said nothing for 2 s"):
            save(mover, store, [10])
        assert not mover.alive
    assert everything(store.state) == set()


def test_a_damaged_image_is_refused_by_the_gpu(program: Owner, mover: Mover, store: Store) -> None:
    with filled(program, mover, contents()):
        made = save(mover, store, [10, 11, 12])
    pack = store.disk.packs / "0.pack"
    whole = bytearray(pack.read_bytes())
    whole[RECORD + HEADER + 777] ^= 4
    pack.write_bytes(whole)
    with pytest.raises(ImageCorrupt, match=rf"chunk 1 of block 110 \(record at {RECORD} of pack 0"):
        load(mover, program, store, made)
    mover.drop([110, 111, 112])
    pack.write_bytes(whole[:-5000])
    with pytest.raises(ImageCorrupt, match="pack 0 ends at"):
        load(mover, program, store, made)


def test_blocks_come_in_whole_lists_or_not_at_all(
    program: Owner, mover: Mover, tmp_path: Path
) -> None:
    free, _ = mover.free_memory()
    first, second = program.create([CHUNK, CHUNK])
    mover.adopt([(1, CHUNK, first)])
    with pytest.raises(Internal, match="already holds a block 1"):
        mover.adopt([(2, CHUNK, second), (1, CHUNK, first)])
    with pytest.raises(Internal, match="holds no block 2"):
        mover.digest([2])
    with (tmp_path / "file").open("wb") as file, pytest.raises(PhosError, match="Import"):
        mover.adopt([(2, CHUNK, second), (3, CHUNK, file.fileno())])
    with pytest.raises(Internal, match="4097 bytes, not a multiple"):
        mover.adopt([(2, 4097, second)])
    with pytest.raises(OutOfMemory):
        mover.create([(4, CHUNK), (5, 1 << 40)])
    mover.adopt([(2, CHUNK, second)])
    mover.drop([1, 2])
    with pytest.raises(Internal, match="holds no block 1"):
        mover.drop([1])
    program.write(1, b"still mine")
    assert program.read(1).startswith(b"still mine")
    os.close(first)
    os.close(second)
    assert mover.free_memory()[0] == free - 2 * CHUNK


def test_memory_is_kept_from_others(program: Owner, mover: Mover) -> None:
    free, total = mover.free_memory()
    mover.reserve(10 * CHUNK)
    assert mover.free_memory() == (free - 10 * CHUNK, total)
    mover.reserve(5 * CHUNK - 1)
    assert mover.free_memory() == (free - 5 * CHUNK, total)
    mover.unreserve()
    mover.unreserve()
    assert mover.free_memory() == (free, total)
    with pytest.raises(OutOfMemory, match="a reserve of"):
        mover.reserve(1 << 40)


def test_more_blocks_than_a_message_or_a_usual_limit_takes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOS_SOFTGPU_MEMORY", "8G")
    count = 1200
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 3 * count), limits[1]))
    try:
        with owner.running() as program, Mover.start(0, RING, store.key) as mover:
            descriptors = program.create([CHUNK] * count)
            mover.adopt([(i, CHUNK, fd) for i, fd in enumerate(descriptors)])
            program.write(count - 1, b"last")
            expected = digest_buffer(store.key, b"last".ljust(CHUNK, b"\0"))
            assert mover.digest([count - 1]) == {count - 1: expected}
            mover.drop(range(count))
            for fd in descriptors:
                os.close(fd)
            made = mover.create([(i, CHUNK) for i in range(count)])
            assert len(set(made)) == count
            for fd in made:
                os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_mover_that_cannot_start_says_why(store: Store) -> None:
    with pytest.raises(InvalidOption, match="too small"):
        Mover.start(0, RECORD, store.key)
    with pytest.raises(PhosError, match="cuDeviceGet"):
        Mover.start(77, RING, store.key)
    with pytest.raises(OutOfMemory, match="staging"):
        Mover.start(0, 3 << 30, store.key)


def test_a_mover_ends_with_its_engine(store: Store) -> None:
    mover = Mover.start(0, RING, store.key)
    mover._channels[0].close()
    deadline = time.monotonic() + 20
    while mover.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not mover.alive
    mover.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_out_of_space(program: Owner) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=9M,mode=0700", "tmpfs", folder]
        if subprocess.run(mount, check=False).returncode:
            pytest.skip("this root may not mount")
        try:
            store = Store(Path(folder) / "state")
            with Mover.start(0, RING, store.key) as mover, filled(program, mover, contents()):
                with pytest.raises(OutOfSpace, match="pack 0"):
                    save(mover, store, [10, 11, 12])
                assert everything(store.state) == set()
                verify(store, save(mover, store, [10]).id, Progress())
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.fixture
def memory_store() -> Iterator[Store]:
    """A store on a tmpfs, where packs are pinned."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Store(Path(folder) / "state")


@pytest.mark.parametrize("room", [16 << 30, 2 * RECORD])
def test_the_device_writes_into_pinned_packs(
    program: Owner, memory_store: Store, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in writing through the file system is not met where the packs were pinned.

    With ``room`` for two records only, the rest of the chunks goes the other way.
    """
    data, store = contents(), memory_store
    pinned = room > sum(SIZES)
    monkeypatch.setenv("PHOS_FAULT", "mover-write:raise")
    store.spares.preallocate(min(room, 2 * sum(SIZES)))
    with Mover.start(0, RING, store.key) as mover, filled(program, mover, data):
        digests = mover.digest([10, 11, 12])
        with store.begin(0) as writer:
            packs = writer.packs(sum(SIZES) // CHUNK)
            number = mover.pin(pack.fd for pack in packs)
            mover.unpin(mover.pin(pack.fd for pack in writer.packs(1)))  # those of another job
            if not pinned:
                with pytest.raises(Internal, match="mover-write"):
                    mover.save(digests, writer, packs=packs)
                return
            made = manifest(writer, mover.save(digests, writer, packs=packs))
            mover.unpin(number)
            writer.publish(made)
        verify(store, made.id, Progress())
        assert load(mover, program, store, made) == data
