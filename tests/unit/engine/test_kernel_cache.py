"""The cache of what is known of kernels: its seal, its versions, its limit."""

import os
from pathlib import Path

import msgspec
import pytest

from phosd.engine.image.mac import sealed
from phosd.engine.kernels import cache as caches
from phosd.engine.kernels.cache import Cache
from phosd.engine.kernels.entry import ANALYSIS, MOST_KERNELS, Entry, KernelFacts, State

KEY = b"k" * 32
DIGEST = "ab" * 32


@pytest.fixture(name="cache")
def _cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, KEY)


def entry(*names: str, digest: str = DIGEST, table: int = 0) -> Entry:
    facts = KernelFacts(64, {"0": "written", "*": "read"}, ("loaded",), table=b"t" * table)
    return Entry(digest, 90, kernels=dict.fromkeys(names, facts))


def file_of(cache: Cache) -> Path:
    return cache.folder / f"{DIGEST}-90"


def test_an_entry_is_found_again_by_its_digest_and_architecture(cache: Cache) -> None:
    assert cache.get(DIGEST, 90) is None
    cache.put(entry("add"))
    assert cache.get(DIGEST, 90) == entry("add")
    assert cache.get(DIGEST, 80) is None and cache.get("cd" * 32, 90) is None
    assert file_of(cache).stat().st_mode & 0o777 == 0o600
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_an_entry_grows(cache: Cache) -> None:
    cache.add(entry("add"))
    cache.add(entry("mul"))
    assert set(cache.add(msgspec.structs.replace(entry(), whole=True)).kernels) == {"add", "mul"}
    found = cache.get(DIGEST, 90)
    assert found is not None and found.whole and set(found.kernels) == {"add", "mul"}


def test_what_was_changed_is_found_anew(cache: Cache) -> None:
    cache.put(entry("add"))
    good = file_of(cache).read_bytes()
    for at in range(0, len(good), 7):
        file_of(cache).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert cache.get(DIGEST, 90) is None
    for size in (0, 1, len(good) - 1):
        file_of(cache).write_bytes(good[:size])
        assert cache.get(DIGEST, 90) is None
    file_of(cache).write_bytes(good)
    assert cache.get(DIGEST, 90) == entry("add")
    assert Cache(cache.folder.parent, b"l" * 32).get(DIGEST, 90) is None, "of another store"
    cache.put(entry("other", digest="cd" * 32))
    (cache.folder / f"{'cd' * 32}-90").rename(file_of(cache))
    assert cache.get(DIGEST, 90) is None, "a sealed entry in the place of another one"


def test_a_manifest_is_no_entry(cache: Cache) -> None:
    cache.put(entry("add"))
    file_of(cache).write_bytes(sealed(KEY, msgspec.json.encode(entry("add"))))
    assert cache.get(DIGEST, 90) is None


def test_another_version_of_the_analysis_is_another_result(cache: Cache) -> None:
    newer = {"analysis": ANALYSIS + 1, "what": "nobody knows yet"}
    cache.put(entry("add"))
    file_of(cache).write_bytes(sealed(KEY, msgspec.json.encode(newer), caches._PURPOSE))
    assert cache.get(DIGEST, 90) is None
    cache.add(entry("mul"))
    assert cache.get(DIGEST, 90) == entry("mul")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_somebody_else_is_none(cache: Cache, tmp_path: Path) -> None:
    cache.put(entry("add"))
    os.chown(file_of(cache), 65534, 65534)
    assert cache.get(DIGEST, 90) is None
    file_of(cache).rename(tmp_path / "elsewhere")
    file_of(cache).symlink_to(tmp_path / "elsewhere")
    assert cache.get(DIGEST, 90) is None
    file_of(cache).unlink()
    os.mkfifo(file_of(cache))
    assert cache.get(DIGEST, 90) is None


def test_the_least_recently_used_go(cache: Cache) -> None:
    digests = [f"{n:02x}" * 32 for n in range(6)]
    cache.limit = 3 * 8192
    for age, digest in enumerate(digests[:3]):
        cache.put(entry("add", digest=digest, table=5000))
        os.utime(cache.folder / f"{digest}-90", (age + 1, age + 1))
    assert cache.get(digests[0], 90), "it is used now"
    for digest in digests[3:5]:
        cache.put(entry("add", digest=digest, table=5000))
    there = [digest for digest in digests if cache.get(digest, 90)]
    assert there == [digests[0], digests[3], digests[4]]
    assert cache.size() <= cache.limit
    cache.limit = 1
    cache.put(entry("add", digest=digests[5]))
    assert cache.get(digests[5], 90), "the newest stays, whatever the limit is"


def test_what_a_crash_has_left_is_removed(cache: Cache) -> None:
    cache.put(entry("add"))
    left = cache.folder / "x.partial"
    left.touch()
    cache.put(entry("mul"))
    assert not left.exists()


def test_a_module_has_no_more_kernels_than_it_may(cache: Cache) -> None:
    cache.add(entry(*(f"k{n}" for n in range(MOST_KERNELS))))
    assert len(cache.add(entry("one more")).kernels) == MOST_KERNELS


def test_a_failure_takes_the_place_of_what_was_known(cache: Cache) -> None:
    cache.add(entry("add"))
    failed = Entry(DIGEST, 90, state=State.CRASHED, reason="why", tools="nvdisasm:1:2")
    assert cache.add(failed) == failed == cache.get(DIGEST, 90)
