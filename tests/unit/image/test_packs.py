"""Pack records: written, found again by scanning, and refused when a byte is wrong or missing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phosd.engine.digest import digest_buffer
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import (
    FIELDS,
    HEADER,
    PAGE,
    RECORD,
    header_fields,
    parse_header,
    read_record,
    record_size,
    scan,
)
from phosd.engine.image.store import Store
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.errors import ImageCorrupt
from tests.support.samples import publish

IMAGE = "20261120T153012-abcd"


def write_pack(path: Path, chunks: list[bytes]) -> list[tuple[int, bytes]]:
    """A pack of ``chunks``; returns (offset, digest stand-in) of each."""
    places = []
    with path.open("wb") as file:
        for i, chunk in enumerate(chunks):
            digest = i.to_bytes(16, "little")
            places.append((file.tell(), digest))
            fields = header_fields(IMAGE, 1000, digest, len(chunk))
            file.write(fields.ljust(HEADER, b"\0") + chunk)
            file.write(bytes(-len(chunk) % PAGE))
    return places


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


def headers(path: Path) -> list[tuple[int, int, bytes, int, str]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return [(r.offset, r.length, r.digest, r.owner, r.image) for r in scan(fd, str(path))]
    finally:
        os.close(fd)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.binary(min_size=1, max_size=3 * PAGE), max_size=5))
def test_a_scan_finds_every_record(folder: Path, chunks: list[bytes]) -> None:
    path = folder / "0.pack"
    places = write_pack(path, chunks)
    assert headers(path) == [
        (offset, len(chunk), digest, 1000, IMAGE)
        for (offset, digest), chunk in zip(places, chunks, strict=True)
    ]
    buffer = bytearray(RECORD)
    fd = os.open(path, os.O_RDONLY)
    for (offset, _), chunk in zip(places, chunks, strict=True):
        record = read_record(fd, offset, buffer, "pack 0")
        assert record.end == offset + record_size(len(chunk))
        assert buffer[HEADER : HEADER + record.length] == chunk
    os.close(fd)


def test_a_pack_cut_anywhere_is_noticed(folder: Path) -> None:
    """At every byte of the fields and of the edges, and at many bytes between."""
    path = folder / "0.pack"
    write_pack(path, [b"a" * 100, b"b" * PAGE, b"c" * 5000])
    whole = path.read_bytes()
    records = headers(path)
    ends = {0, *(offset + record_size(length) for offset, length, *_ in records)}
    edges = {e + d for e in (0, *ends, *(r[0] + HEADER for r in records)) for d in range(-99, 100)}
    for cut in sorted((edges | set(range(0, len(whole), 97))) & set(range(len(whole)))):
        path.write_bytes(whole[:cut])
        if cut in ends:
            assert len(headers(path)) == sum(r[0] < cut for r in records)
        else:
            with pytest.raises(ImageCorrupt, match=r"record at \d+ of"):
                headers(path)


@given(st.integers(0, 8 * HEADER - 1))
def test_any_flipped_bit_of_a_header_is_noticed(bit: int) -> None:
    header = bytearray(header_fields(IMAGE, 0, bytes(16), 4096).ljust(HEADER, b"\0"))
    assert parse_header(header, 0, "pack 0").length == 4096
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ImageCorrupt, match="record at 0 of pack 0"):
        parse_header(header, 0, "pack 0")


@given(st.binary(max_size=2 * FIELDS))
def test_rubbish_is_no_header(data: bytes) -> None:
    with pytest.raises(ImageCorrupt):
        parse_header(data, 0, "pack 0")
    with pytest.raises(ImageCorrupt):
        parse_header(data.ljust(HEADER, b"\0"), 0, "pack 0")


@pytest.mark.parametrize("length", [0, CHUNK + 1, 2**63])
def test_an_absurd_length_is_refused(length: int) -> None:
    header = header_fields(IMAGE, 0, bytes(16), length).ljust(HEADER, b"\0")
    with pytest.raises(ImageCorrupt, match=f"claims {length} bytes"):
        parse_header(header, 0, "pack 0")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    store = Store(tmp_path_factory.mktemp("store") / "state")
    content = bytes(range(256)) * 64 + os.urandom(8192)
    return store, publish(store, content.ljust(CHUNK + 8192, b"\7")).id


@settings(max_examples=60)
@given(st.data())
def test_verify_notices_any_flipped_bit(published: tuple[Store, str], data: st.DataObject) -> None:
    """Wherever it is: in a chunk, a header, a CRIU file."""
    store, image = published
    folders = (store.disk.images / image, store.disk.packs)
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    others = ("manifest.json", "0.damaged")
    path = data.draw(st.sampled_from(sorted(p for p in files if p.name not in others)))
    if path.suffix == ".pack":
        used = [
            range(FIELDS),
            range(HEADER, RECORD + FIELDS),
            range(RECORD + HEADER, RECORD + HEADER + 8192),
        ]
        at = data.draw(st.one_of([st.integers(r.start, r.stop - 1) for r in used]))
    else:
        at = data.draw(st.integers(0, path.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        try:
            name = "pack 0" if path.suffix == ".pack" else path.name
            with pytest.raises(ImageCorrupt, match=name):
                verify(store, image, Progress())
        finally:
            file.seek(at)
            file.write(bytes([byte]))
    verify(store, image, Progress())


def test_verify_names_the_chunk(published: tuple[Store, str]) -> None:
    store, image = published
    path = store.disk.packs / "0.pack"
    whole = path.read_bytes()
    for cut in (100, HEADER + 5, RECORD + 10, len(whole) - 1):
        path.write_bytes(whole[:cut])
        offset = 0 if cut < RECORD else RECORD
        where = (
            rf"record at {offset} of pack 0 .*chunk at {hex(CHUNK if offset else 0)} of block 0x7f"
        )
        with pytest.raises(ImageCorrupt, match=where):
            verify(store, image, Progress())
    path.write_bytes(whole)
    verify(store, image, Progress())


def test_verify_refuses_a_chunk_of_another_user_or_place(published: tuple[Store, str]) -> None:
    store, image = published
    path = store.disk.packs / "0.pack"
    whole = path.read_bytes()
    chunk = whole[RECORD + HEADER : RECORD + HEADER + 8192]
    digest = digest_buffer(store.key, chunk)[0]
    foreign = header_fields(image, 4711, digest, 8192).ljust(HEADER, b"\0")
    path.write_bytes(whole[:RECORD] + foreign + whole[RECORD + HEADER :])
    with pytest.raises(ImageCorrupt, match="holds other bytes"):
        verify(store, image, Progress())
    path.write_bytes(whole)
