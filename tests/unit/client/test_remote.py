"""Images at a URL: only what is new travels, and what was interrupted goes on."""

import hashlib
import os
import random
import resource
import shutil
import struct
import sys
import time
from pathlib import Path

import pytest

from phosd.client import remote as module
from phosd.client.remote import Remote
from phosd.client.transfer import PhosdHasLeft
from phosd.errors import (
    ImageCorrupt,
    InvalidOption,
    NoSuchImage,
    PhosError,
    RemoteFailed,
    Unsupported,
)
from phosd.portable import MAX_MANIFEST, Head
from tests.support.remote import Image, pulled, pushed

FIRST, SECOND = "20260101T000000-0001", "20260102T000000-0002"
CHUNK = 1000


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACK", 4 * CHUNK)


@pytest.fixture(params=["file", "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    place = tmp_path / "images" if request.param == "file" else f"/{os.urandom(8).hex()}"
    return Remote(f"{request.param}://{place}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "images"


def parts(seed: int, count: int = 30) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(CHUNK if n < count - 1 else 17) for n in range(count)]


def found(remote: Remote, name: str) -> str:
    return remote.find(name).contents.image.id


def test_only_new_chunks_travel(remote: Remote) -> None:
    with pytest.raises(NoSuchImage):
        remote.find("latest")
    first = Image(FIRST, parts(1))
    sent = pushed(remote, first)
    assert (sent.sent_chunks, sent.sent_bytes) == (30, 29 * CHUNK + 17)
    assert pulled(remote) == first.parts
    assert pushed(remote, first).sent_chunks == 0
    second = Image(SECOND, [*parts(1)[5:25], *parts(2, 10)])
    assert pushed(remote, second).sent_chunks == 10
    assert remote.images() == [FIRST, SECOND]
    assert pulled(remote) == second.parts
    assert pulled(remote, FIRST[:8]) == first.parts
    for name in ("2026", "2027", "../x", ""):
        with pytest.raises(NoSuchImage):
            remote.find(name)


@pytest.mark.parametrize("seed", range(4))
def test_a_push_goes_on_where_it_was(remote: Remote, seed: int) -> None:
    image = Image(FIRST, parts(seed))
    total = sum(map(len, image.parts))
    stop = random.Random(seed).randrange(4 * CHUNK, total)
    with pytest.raises(PhosdHasLeft):
        pushed(remote, image, most=stop)
    assert remote.images() == []
    sent = pushed(remote, image)
    assert sent.sent_bytes <= total - (stop // (4 * CHUNK)) * 4 * CHUNK
    assert pulled(remote) == image.parts


def test_what_was_written_in_half_is_written_again(folder: Path) -> None:
    remote = Remote(f"file://{folder}")
    image = Image(FIRST, parts(1))
    pushed(remote, image)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        os.truncate(path, size // 2)
        with pytest.raises(PhosError):
            pulled(remote)
        pushed(remote, image)
        assert path.stat().st_size == size
        assert pulled(remote) == image.parts
        path.unlink()
        with pytest.raises(PhosError):
            pulled(remote)
        pushed(remote, image)
        assert pulled(remote) == image.parts


def test_another_image_of_the_same_id_is_not_overwritten(remote: Remote) -> None:
    pushed(remote, Image(FIRST, parts(1)))
    with pytest.raises(InvalidOption, match="another image"):
        pushed(remote, Image(FIRST, parts(2)))
    assert pulled(remote) == parts(1)


def test_an_image_is_found_by_its_name(remote: Remote) -> None:
    pushed(remote, Image(FIRST, parts(1), "bert"))
    pushed(remote, Image(SECOND, parts(2), "gpt"))
    assert (found(remote, "bert"), found(remote, "gpt")) == (FIRST, SECOND)
    pushed(remote, Image("20260103T000000-0003", parts(3), "bert"))
    assert found(remote, "bert") == "20260103T000000-0003"
    with pytest.raises(NoSuchImage, match="no image of ber "):
        remote.find("ber")


def test_the_same_image_in_other_words_is_the_same(remote: Remote) -> None:
    """A newer phosd may have more to say of it."""
    image = Image(FIRST, parts(1))
    pushed(remote, image)
    before = image.head
    image.head = Head(image.head.manifest.replace(b"{", b'{"more": 1, ', 1))
    assert pushed(remote, image).sent_chunks == 0
    assert remote.head(FIRST) == before


def test_a_signature_is_added_and_not_lost(remote: Remote) -> None:
    image = Image(FIRST, parts(1))
    pushed(remote, image)
    plain, image.head = image.head, Head(image.head.manifest, b"signed")
    pushed(remote, image)
    assert remote.head(FIRST).signature == b"signed"
    image.head = plain
    pushed(remote, image)
    assert remote.head(FIRST).signature == b"signed"


def test_what_others_have_written_is_no_index(folder: Path) -> None:
    remote = Remote(f"file://{folder}")
    pushed(remote, Image(FIRST, parts(1)))
    (index,) = (folder / "index").iterdir()
    for text, error in ((b'{"format":9,"packs":[]}', Unsupported), (b"[]", RemoteFailed)):
        name = f"{FIRST}-{hashlib.sha256(text).hexdigest()}.json"
        (folder / "index" / name).write_bytes(text)
        with pytest.raises(error):
            pulled(remote)
        (folder / "index" / name).unlink()
    (folder / "index/readme.txt").write_text("of others")
    assert pulled(remote) == parts(1)
    assert index.exists()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def hostile(folder: Path, told: list[str]) -> Remote:
    """A place to which others write; two images of a program are there."""
    remote = Remote(f"file://{folder}", told.append)
    pushed(remote, Image(FIRST, parts(1), "bert"))
    pushed(remote, Image(SECOND, parts(2), "bert"))
    return remote


def head_file(folder: Path, image: str) -> Path:
    return folder / f"images/{image}.phos"


def test_an_older_image_in_the_place_of_a_newer_is_not_taken_for_it(
    hostile: Remote, folder: Path, told: list[str]
) -> None:
    shutil.copy(head_file(folder, FIRST), head_file(folder, SECOND))
    for name in (SECOND, SECOND[:8]):
        with pytest.raises(ImageCorrupt, match=f"of '{FIRST}', .*2026-01-01.*not of {SECOND}"):
            pulled(hostile, name)
    assert found(hostile, "latest") == found(hostile, "bert") == FIRST
    assert [SECOND in line and FIRST in line for line in told] == [True, True]
    head_file(folder, FIRST).unlink()
    with pytest.raises(NoSuchImage, match="no image that can be read"):
        hostile.find("latest")


@pytest.mark.parametrize("renamed", [True, False])
def test_one_from_the_future_is_not_the_newest(
    hostile: Remote, folder: Path, told: list[str], renamed: bool
) -> None:
    """Neither one that was renamed, nor one that a wrong clock has dated."""
    future = "29991231T235959-ffff"
    if renamed:
        head_file(folder, FIRST).rename(head_file(folder, future))
    else:
        pushed(hostile, Image(future, parts(3), "bert"))
    assert found(hostile, "latest") == found(hostile, "bert") == SECOND
    assert len(told) == 2 and all(f"{future} at" in line and "future" in line for line in told)
    if not renamed:
        assert pulled(hostile, future) == parts(3)
    head_file(folder, SECOND).unlink()
    head_file(folder, FIRST).unlink(missing_ok=True)
    with pytest.raises(NoSuchImage, match=f"future: {future}"):
        hostile.find("latest")


def test_clocks_may_differ(hostile: Remote) -> None:
    soon = time.strftime("%Y%m%dT%H%M%S-0000", time.gmtime(time.time() + 3600))
    pushed(hostile, Image(soon, parts(3)))
    assert found(hostile, "latest") == soon


def prefix(signature: int, manifest: int, made_as: int = 1) -> bytes:
    return b"PHOSIMG\0" + struct.pack("<IIQ", made_as, signature, manifest)


@pytest.mark.parametrize(
    ("rubbish", "why"),
    [
        (b"", "cut short"),
        (b"x" * 100, "not the image of a phosd"),
        (prefix(0, 1 << 63), "more than"),
        (prefix(1 << 31, 10), "more than"),
        (prefix(0, MAX_MANIFEST), "cut short"),
        (prefix(0, 4) + b"null", "cannot be read"),
        (prefix(0, 1, 9) + b"1", "a newer phosd"),
    ],
)
def test_a_bad_head_spoils_nothing_but_itself(
    hostile: Remote, folder: Path, told: list[str], rubbish: bytes, why: str
) -> None:
    third = "20260103T000000-0003"
    with head_file(folder, third).open("wb") as file:
        file.write(rubbish)
    listed = [head.contents.image.id for head in hostile.heads(hostile.images())]
    assert listed == [FIRST, SECOND]
    assert found(hostile, "latest") == found(hostile, "bert") == SECOND
    assert len(told) == 3 and all(third in line and why in line for line in told)
    assert pulled(hostile, SECOND) == parts(2)


@pytest.mark.parametrize("what", ["head", "index"])
def test_no_more_is_read_than_a_head_or_an_index_may_have(
    hostile: Remote, folder: Path, what: str
) -> None:
    """They are files of 8 TiB."""
    third = "20260103T000000-0003"
    path = head_file(folder, third)
    if what == "index":
        path = folder / f"index/{third}-{'0' * 64}.json"
    with path.open("wb") as file:
        file.write(prefix(0, 2) + b"{}")
        file.truncate(1 << 43)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if what == "head":
        with pytest.raises(ImageCorrupt):
            hostile.head(third)
    assert pulled(hostile, SECOND) == parts(2)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200 << 10  # KiB


def test_without_fsspec_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(Unsupported, match="install it: `make setup` in /") as raised:
        Remote("file:///x")
    assert raised.value.reason == "missing-package"


def test_a_name_is_no_place_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is meant as a machine or a bucket, and would be a folder that nobody finds."""
    monkeypatch.chdir(tmp_path)
    for name in ("backup", "gpu7:/srv/images", "training/images", ""):
        with pytest.raises(InvalidOption, match="is neither a URL nor a folder") as raised:
            Remote(name)
        assert "s3://BUCKET/FOLDER" in str(raised.value) and "phos export" in str(raised.value)
    (tmp_path / "backup").mkdir()
    for place in ("backup", f"{tmp_path}/new", "./newer", "simplecache::memory://x"):
        assert Remote(place).images() == []


def test_what_is_no_place_for_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="nowhere"):
        Remote("nowhere://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(PhosError, match="cannot be"):
        pushed(Remote(f"file://{tmp_path}/file"), Image(FIRST, parts(1)))
    with pytest.raises(InvalidOption, match="is not there"):
        pushed(Remote(f"file://{tmp_path}/not/there"), Image(FIRST, parts(1)))
