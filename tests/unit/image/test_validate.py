"""Hostile manifests: each is refused by name, and none reaches a path or a pack."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phosd import __version__
from phosd.engine.image.mac import unsealed
from phosd.engine.image.manifest import CHUNK, FORMAT, Manifest
from phosd.engine.image.store import Store
from phosd.engine.image.validate import valid_relative
from phosd.errors import ImageCorrupt
from tests.support.samples import publish, rewrite

CONTENT = b"\1" * CHUNK + b"\2" * 4096
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Manifest]:
    store = Store(tmp_path_factory.mktemp("store") / "state")
    return store, publish(store, CONTENT)


def refusal(image: tuple[Store, Manifest], change: Change) -> str:
    """The error of an image whose manifest was changed; the manifest is put back afterwards."""
    store, manifest = image
    path = store.disk.images / manifest.id / "manifest.json"
    original = path.read_bytes()
    fields = json.loads(original)
    del fields["seal"]
    change(fields)
    rewrite(store, manifest.id, json.dumps(fields).encode())
    try:
        with pytest.raises(ImageCorrupt) as caught, store.open(manifest.id):
            pass
        return str(caught.value)
    finally:
        path.write_bytes(original)


def block(**values: Any) -> Change:
    return lambda m: m["blocks"][0].update(values)


def chunk(field: int, value: Any) -> Change:
    return lambda m: m["blocks"][0]["chunks"][1].__setitem__(field, value)


def file(**values: Any) -> Change:
    return lambda m: m["trees"][0]["files"][0].update(values)


def add_block(**values: Any) -> Change:
    return lambda m: m["blocks"].append(m["blocks"][0] | {"id": 2} | values)


REFUSED: dict[str, tuple[Change, str]] = {
    "format": (lambda m: m.update(format=99), "format 99"),
    "other id": (lambda m: m.update(id="20261120T153012-abcd"), "says it is"),
    "parent": (lambda m: m.update(parent="../x"), "no parent"),
    "owner": (lambda m: m.update(owner=-1), "no valid owner"),
    "unknown field": (lambda m: m.update(run="rm"), "unknown field"),
    "type": (lambda m: m.update(blocks=7), "cannot be read"),
    "huge number": (block(size=10**30), "bytes"),
    "folder": (lambda m: m["trees"][0].update(folder="../../etc"), "names the folder"),
    "absolute folder": (lambda m: m["trees"][0].update(folder="/etc"), "names the folder"),
    "file": (file(path="a/../../../x"), "names the file"),
    "file with zero": (file(path="a\0b"), "names the file"),
    "file size": (file(size=-1), "negative size"),
    "file digest": (file(sha256="0" * 63), "no digest"),
    "pid": (lambda m: m["processes"][0].update(pid=0), "process id 0"),
    "large pid": (
        lambda m: m["processes"][0].update(pid=1 << 63),
        "process id 9223372036854775808",
    ),
    "thread": (lambda m: m["processes"][0].update(threads=[7, 1 << 23]), "process id 8388608"),
    "tree": (lambda m: m["processes"][0].update(tree=1), "in no tree"),
    "uid": (lambda m: m["processes"][0].update(uid=-1), "no user"),
    "gpu twice": (lambda m: m["gpus"].append(m["gpus"][0]), "two GPUs of one number"),
    "gpu with two numbers": (
        lambda m: m["gpus"].append(m["gpus"][0] | {"ordinal": 1}),
        "two GPUs of one UUID",
    ),
    "gpu's uuid": (lambda m: m["gpus"][0].update(uuid="GPU-0"), "without a UUID"),
    "host's uuid": (
        lambda m: m["host"].update(gpus=[{"uuid": "MIG-0", "chip": ""}]),
        "without a UUID",
    ),
    "gpu's bytes": (lambda m: m["gpus"][0].update(needs=-1), "needs -1 bytes"),
    "block's process": (block(process=1), "in no process"),
    "block's negative process": (block(process=-1), "in no process"),
    "block's gpu": (block(gpu=3), "unknown GPU"),
    "block's address": (block(va=-4096), "no address"),
    "block of nothing": (block(size=0), "0 bytes"),
    "block too large": (block(size=1 << 60), "bytes"),
    "block not of pages": (block(size=CHUNK + 100), "bytes"),
    "chunks missing": (block(size=3 * CHUNK), "not all chunks"),
    "chunk length": (chunk(3, 4080), "chunk of 4080 bytes"),
    "chunk huge": (chunk(3, 1 << 40), "bytes"),
    "chunk digest": (chunk(0, "../../../../../../../../../etc/x"), "undigested"),
    "chunk pack": (chunk(1, -1), "no pack"),
    "chunk in a pack that is not there": (chunk(1, 77), "pack 77 of image .* is missing"),
    "chunk offset": (chunk(2, -4096), "at -4096"),
    "chunk offset odd": (chunk(2, 5), "at 5"),
    "chunk beyond": (chunk(2, 1 << 30), "of its pack"),
    "block twice": (add_block(id=1), "two blocks of one id"),
    "alias of nothing": (add_block(alias=[0, 9], chunks=[]), "is not there"),
    "alias of another size": (add_block(alias=[0, 1], chunks=[], size=4096), "is not there"),
    "alias of itself": (add_block(alias=[0, 2], chunks=[]), "is not there"),
    "alias with chunks": (add_block(alias=[0, 1]), "twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_manifest_is_refused(image: tuple[Store, Manifest], name: str) -> None:
    change, expected = REFUSED[name]
    message = refusal(image, change)
    assert re.search(expected, message), message
    assert "delete it" in message


def test_an_image_of_another_version_is_refused_by_its_name(
    image: tuple[Store, Manifest],
) -> None:
    """It is whole: another phosd can restore it. What this one wrote it should be able to read."""
    newer = refusal(image, lambda m: m.update(format=FORMAT + 1, phosd="7.1"))
    assert re.search(
        f"was made by phosd 7.1 in format {FORMAT + 1}; this is phosd .*, which reads format "
        f"{FORMAT}; restore it with phosd 7.1 or a newer one",
        newer,
    )
    assert "made by phosd 7.1" in refusal(image, lambda m: m.update(phosd="7.1", colour="red"))
    own = refusal(image, lambda m: m.update(phosd=__version__, colour="red"))
    assert "cannot be read" in own and "made by" not in own


def test_every_flipped_bit_and_every_cut_is_noticed(image: tuple[Store, Manifest]) -> None:
    """The whole text is tried: numbers that would make sense as well, and the seal itself."""
    store, manifest = image
    path = store.disk.images / manifest.id / "manifest.json"
    original = path.read_bytes()
    chance = random.Random(9)

    def refused(damaged: bytes) -> None:
        path.write_bytes(damaged)
        with pytest.raises(ImageCorrupt, match=f"manifest of image {manifest.id}"):
            store.get(manifest.id)

    try:
        for at in range(len(original)):
            flipped = bytes([original[at] ^ 1 << chance.randrange(8)])
            refused(original[:at] + flipped + original[at + 1 :])
            refused(original[:at])
    finally:
        path.write_bytes(original)
    assert store.get(manifest.id) == manifest


@settings(max_examples=100)
@given(st.data())
def test_under_a_right_seal_any_text_is_an_error_or_valid(
    image: tuple[Store, Manifest], data: st.DataObject
) -> None:
    """A seal makes nothing trusted: what is under it is checked all the same."""
    store, manifest = image
    path = store.disk.images / manifest.id / "manifest.json"
    original = path.read_bytes()
    body = unsealed(store.key.packed, original)
    assert body is not None
    at = data.draw(st.integers(1, len(body) - 2))
    damaged = data.draw(
        st.one_of(
            st.just(body[:at]),
            st.binary(max_size=4).map(lambda b: body[:at] + b + body[at + 1 :]),
        )
    )
    rewrite(store, manifest.id, damaged)
    try:
        with store.open(manifest.id) as opened:
            assert opened.manifest.id == manifest.id
            assert set(opened.packs) == {0}
    except ImageCorrupt:
        pass
    finally:
        path.write_bytes(original)


def test_a_manifest_of_another_store_is_refused(
    image: tuple[Store, Manifest], tmp_path: Path
) -> None:
    store, manifest = image
    other = Store(tmp_path / "other")
    shutil.copytree(store.disk.images / manifest.id, other.disk.images / manifest.id)
    with pytest.raises(ImageCorrupt, match="seal is broken"):
        other.get(manifest.id)


@pytest.mark.parametrize("path", ["a", "core-1.img", "sub/pages-1.img", "a/b/c/d"])
def test_plain_relative_paths_are_fine(path: str) -> None:
    assert valid_relative(path)


@pytest.mark.parametrize(
    "path",
    ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\nb", "é", "a" * 201, "a/" * 9],
)
def test_other_paths_are_not(path: str) -> None:
    assert not valid_relative(path)
