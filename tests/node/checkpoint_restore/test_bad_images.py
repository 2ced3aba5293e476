"""A damaged or foreign image is refused before anything is touched; the error names the part."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.errors import DriverTooOld, GpuMismatch, ImageCorrupt, NoSuchImage, PhosError
from tests.node.checkpoint_restore.cycle import save
from tests.support import harness
from tests.support.samples import rewrite


@dataclass(frozen=True)
class Saved:
    """An image whose program was killed, in a state folder that must not be changed."""

    state: Path
    runtime: Path
    image: str
    target: harness.Target


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    place = tmp_path_factory.mktemp("image")
    with Node(NodeConfig(state_dir=place / "state", runtime_dir=place / "run")) as node:
        target = harness.start("single", place, runtime=place / "run")
        try:
            target.wait_for_steps(14)
            image = save(node, target, "stop").id
        finally:
            target.kill()
    return Saved(place / "state", place / "run", image, target)


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Iterator[Node]:
    """A node with a copy of the image, which a test may damage."""
    shutil.copytree(saved.state, tmp_path / "state")
    with Node(NodeConfig(state_dir=tmp_path / "state", runtime_dir=saved.runtime)) as node:
        yield node


def refuses(node: Node, saved: Saved, error: type[PhosError], match: str = "") -> None:
    """A restore raises ``error`` and leaves no trace."""
    before = saved.target.log.read_bytes()
    with pytest.raises(error, match=match):
        restore(node, saved.image, RestoreOptions(), Progress())
    assert not harness.alive(saved.target.pid)
    assert saved.target.log.read_bytes() == before


def damaged(node: Node, saved: Saved, match: str = "") -> None:
    """Both ``verify`` and ``restore`` say that the image is corrupt."""
    with pytest.raises(ImageCorrupt, match=match):
        verify(node.store, saved.image, Progress())
    refuses(node, saved, ImageCorrupt, match)


def packs(node: Node) -> list[Path]:
    return sorted(node.config.state_dir.glob("packs/*.pack"))


def criu_files(node: Node, saved: Saved) -> list[Path]:
    folder = node.config.state_dir / "images" / saved.image
    return sorted(p for p in folder.rglob("*.img") if p.stat().st_size > 0)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_the_copy_is_good(copy: Node, saved: Saved) -> None:
    """The other tests say nothing unless this one passes."""
    verify(copy.store, saved.image, Progress())
    try:
        assert restore(copy, saved.image, RestoreOptions(), Progress()).pid == saved.target.pid
        assert harness.alive(saved.target.pid)
    finally:
        saved.target.kill()


def test_a_flipped_byte_in_any_chunk(copy: Node, saved: Saved) -> None:
    """Somewhere in the payload of a chunk that the image uses, and in its header."""
    chance = random.Random(7)
    manifest = copy.store.get(saved.image)
    chunks = [(b, c) for b in manifest.blocks for c in b.chunks]
    for block, chunk in chance.sample(chunks, min(4, len(chunks))):
        pack = packs(copy)[0].parent / f"{chunk.pack}.pack"
        offset = chunk.offset + 4096 + chance.randrange(chunk.length)
        flip(pack, offset)
        with pytest.raises(ImageCorrupt, match=f"block {block.va:#x}"):
            verify(copy.store, saved.image, Progress())
        refuses(copy, saved, ImageCorrupt, f"record at {chunk.offset} of pack")
        flip(pack, offset)
    verify(copy.store, saved.image, Progress())


def test_a_truncated_pack(copy: Node, saved: Saved) -> None:
    pack = packs(copy)[-1]
    with pack.open("r+b") as file:
        file.truncate(pack.stat().st_size - 4097)
    damaged(copy, saved, r"record at .* of pack|pack \d+ ends at")  # as the cut falls


def test_a_missing_pack(copy: Node, saved: Saved) -> None:
    packs(copy)[0].unlink()
    damaged(copy, saved, "pack")


@pytest.mark.parametrize("kind", ["files.img", "core-"])
def test_a_criu_file_that_cannot_be_read(copy: Node, saved: Saved, kind: str) -> None:
    path = next(each for each in criu_files(copy, saved) if each.name.startswith(kind))
    with path.open("r+b") as file:
        file.seek(12)  # after the magic numbers and the length of the first message
        file.write(b"\xff" * 12)
    damaged(copy, saved, path.name)


def test_a_damaged_criu_file(copy: Node, saved: Saved) -> None:
    files = criu_files(copy, saved)
    for path in random.Random(8).sample(files, 3):
        flip(path, path.stat().st_size // 2)
        damaged(copy, saved, path.name)
        flip(path, path.stat().st_size // 2)
    with files[0].open("r+b") as file:
        file.truncate(files[0].stat().st_size - 1)
    damaged(copy, saved, files[0].name)


def test_a_missing_criu_file(copy: Node, saved: Saved) -> None:
    path = criu_files(copy, saved)[0]
    path.unlink()
    damaged(copy, saved, path.name)


def test_a_truncated_manifest(copy: Node, saved: Saved) -> None:
    path = copy.config.state_dir / "images" / saved.image / "manifest.json"
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        damaged(copy, saved, "manifest")


def test_a_flipped_byte_in_the_manifest(copy: Node, saved: Saved) -> None:
    """Also where it would make sense: another pid, another address, other bytes of a file."""
    path = copy.config.state_dir / "images" / saved.image / "manifest.json"
    whole = path.read_bytes()
    for field in (b'"pid":', b'"va":', b'"uid":', b'"size":', b'"seal":"'):
        at = whole.index(field) + len(field)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        damaged(copy, saved, "manifest")


def test_an_image_that_does_not_exist(copy: Node, saved: Saved) -> None:
    for image in ("20200101T000000-0000", "../" + saved.image, "", "a/b"):
        with pytest.raises(NoSuchImage):
            restore(copy, image, RestoreOptions(), Progress())


Change = Callable[[Manifest], dict[str, Any]]


def other_chip(manifest: Manifest) -> dict[str, Any]:
    return {"gpus": tuple(msgspec.structs.replace(g, chip="NVIDIA XYZ") for g in manifest.gpus)}


def newer_driver(manifest: Manifest) -> dict[str, Any]:
    return {"host": msgspec.structs.replace(manifest.host, driver=manifest.host.driver + 1000)}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [(other_chip, GpuMismatch, "NVIDIA XYZ"), (newer_driver, DriverTooOld, "driver")],
)
def test_an_image_of_another_machine(
    change: Change, error: type[PhosError], match: str, copy: Node, saved: Saved
) -> None:
    manifest = copy.store.get(saved.image)
    other = msgspec.structs.replace(manifest, **change(manifest))
    rewrite(copy.store, saved.image, msgspec.json.encode(other))
    refuses(copy, saved, error, match)
