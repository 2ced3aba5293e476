"""``phos warm-cache``: what is installed is analysed ahead of time, as programs will load it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phosd.cli.main import main
from phosd.engine.analysis.code.images import loadable
from phosd.engine.image.folder import StoreFolder
from phosd.engine.kernels.analyser import Analyser
from phosd.engine.kernels.cache import Cache
from phosd.engine.kernels.module import Module
from tests.native.analysis.oracle import machine_code
from tests.native.analysis.test_command import SOURCE
from tests.system.cli.test_json import check

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what is known of kernels is root's")
NAMES = {"add", "chase", "pick", "count"}


def fat_binary(cubin: bytes, architecture: int = 90) -> bytes:
    """A fat binary with one cubin, as nvcc writes it."""
    padded = cubin + bytes(-len(cubin) % 8)
    place = (2, 0x101, 64, len(padded), 0, architecture, 0, 0, 0, 0)
    entry = struct.pack("<HHIQI8xIIIQ8xQ", *place)
    body = entry + padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.fixture(name="state")
def _state(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    StoreFolder(state)
    return state


def warm(state: Path, *words: str | Path) -> Result:
    command = ["warm-cache", "--state-dir", str(state), "--architecture", "90", *map(str, words)]
    return CliRunner().invoke(main, command)


def test_what_a_program_will_load_is_known_before(state: Path, tmp_path: Path) -> None:
    """Each fat binary of a library by itself, also in a folder below, once."""
    module = fat_binary(machine_code(SOURCE)[1])
    other = fat_binary(machine_code("__global__ void other(int* a) { *a = 1; }")[1], 80)
    library = Path("/bin/true").read_bytes() + module + b"between" + other
    folder = tmp_path / "lib/below"
    folder.mkdir(parents=True)
    (folder / "liba.so.1").write_bytes(library)
    (folder / "liba.so").symlink_to("liba.so.1")
    (folder / "broken.cubin").write_bytes(b"\x7fELF nothing")
    (folder / "empty.ptx").touch()
    os.mkfifo(folder / "pipe.so")
    assert [*loadable(library)] == [module, other]

    done = warm(state, tmp_path / "lib", "--json")
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, done.stdout.splitlines())
    check([row], "`phos warm-cache`")
    assert (row["modules"], row["kernels"], row["failed"], row["unfinished"]) == (1, 4, 0, 0)
    assert (row["roles"], row["ranges"]) == (3, 1)
    cache = Cache(state, StoreFolder(state).key.packed)
    with Module.of(module) as loaded:
        entry = cache.get(loaded.digest, 90)
        assert entry is not None and entry.whole and set(entry.kernels) == NAMES
        assert Analyser(cache).analyse(loaded, 90, {"add"}).seconds == 0

    again = warm(state, tmp_path / "lib")
    assert "4 kernels in 1 modules, roles known of 75%" in again.stdout


def test_what_is_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "k.cubin").write_bytes(machine_code(SOURCE)[1])
    none = warm(tmp_path, tmp_path / "k.cubin")
    assert none.exit_code == 2 and "is not phosd's folder" in none.stderr
    missing = warm(state, tmp_path / "none")
    assert missing.exit_code == 2 and "does not exist" in missing.stderr
    empty = warm(state, state)
    assert empty.exit_code == 0 and "there are no kernels for sm_90" in empty.stderr
