"""The bytes of what a process has loaded, read with the rights of its owner."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.hook_client.code_images import CodeImage, Held, hash_of
from phosd.engine.kernels.fetch import fetch
from phosd.engine.kernels.module import Module
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Cancelled, NoSuchProcess, Timeout, Unsupported

DATA = bytes(range(256)) * 100
NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes others")


@pytest.fixture(name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that the user nobody owns and cannot reach."""
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.fixture(name="theirs", scope="module")
def _theirs() -> Iterator[ProcessId]:
    """A process of the user nobody."""
    child = subprocess.Popen(["sleep", "1000"], user=NOBODY, group=NOBODY, extra_groups=[])
    found = procfs.process_id(child.pid)
    assert found is not None
    yield found
    child.kill()
    child.wait()


def in_file(path: Path, data: bytes = DATA, size: int | None = None) -> CodeImage:
    return CodeImage(hash_of(data), 0, size or len(data), Held.IN_FILE, str(path))


def refused(process: ProcessId, image: CodeImage) -> str:
    with pytest.raises(Unsupported) as caught:
        fetch(process, image, threading.Event())
    return caught.value.what


def test_a_file_that_the_owner_may_read(theirs: ProcessId, folder: Path) -> None:
    (folder / "module").write_bytes(DATA)
    (folder / "link").symlink_to("module")
    for name in ("module", "link"):
        with fetch(theirs, in_file(folder / name), threading.Event()) as module:
            assert os.pread(module.file, module.size, 0) == DATA
            with pytest.raises(PermissionError):
                os.write(module.file, b"x")


def test_what_the_owner_may_not_read(theirs: ProcessId, folder: Path) -> None:
    secret = folder / "secret"
    secret.write_bytes(DATA)
    secret.chmod(0o600)
    (folder / "link").symlink_to(secret)
    for path in (secret, folder / "link"):
        assert "Permission denied" in refused(theirs, in_file(path))
    root = Path("/proc/self/root/etc/hostname")
    assert "it is another file now" in refused(theirs, in_file(root))


def test_what_is_no_plain_file(theirs: ProcessId, folder: Path) -> None:
    """None of them is waited for, and one that grows is another one."""
    os.mkfifo(folder / "fifo", 0o666)
    os.chmod(folder / "fifo", 0o666)  # noqa: PTH101
    (folder / "grown").write_bytes(DATA + b"more")
    (folder / "changed").write_bytes(DATA[:-1] + b"x")
    for path in (folder / "fifo", Path("/dev/zero"), folder, folder / "grown"):
        assert "it is another file now" in refused(theirs, in_file(path))
    assert "not what it was" in refused(theirs, in_file(folder / "changed"))


def test_sizes_that_cannot_be(theirs: ProcessId, folder: Path) -> None:
    for size in (1 << 40, (1 << 64) - 1):
        assert "are no image that is read" in refused(theirs, in_file(folder, size=size))
    assert "are no image that is read" in refused(
        theirs, CodeImage(1, (1 << 64) - 1, 100, Held.IN_COPY)
    )
    assert "kept" in refused(theirs, CodeImage(1, 0, 100, Held.NOT_KEPT))


def test_memory() -> None:
    """This very process is read, which is root's: what is there, has changed, and is not there."""
    buffer = ctypes.create_string_buffer(DATA, len(DATA))
    me = procfs.process_id(os.getpid())
    assert me is not None
    there = CodeImage(hash_of(DATA), ctypes.addressof(buffer), len(DATA), Held.IN_COPY)
    with fetch(me, there, threading.Event()) as module, Module.of(DATA) as same:
        assert module.digest == same.digest
    nowhere = CodeImage(hash_of(DATA), 4096, len(DATA), Held.IN_OBJECT)
    assert "Input/output error" in refused(me, nowhere)
    buffer[0] = b"\xff"
    assert "not what it was" in refused(me, there)


def test_a_process_that_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    gone = ProcessId(child.pid, 1)
    with pytest.raises(NoSuchProcess):
        fetch(gone, CodeImage(1, 4096, 1, Held.IN_COPY), threading.Event())
    child.wait()
    with pytest.raises(NoSuchProcess):
        fetch(gone, CodeImage(1, 4096, 1, Held.IN_COPY), threading.Event())


def test_a_reader_that_its_user_stops(
    theirs: ProcessId, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the user's ids, so that any signal may come; phosd waits no longer than it says."""
    (folder / "module").write_bytes(DATA)
    began = subprocess.Popen

    def stopped(*words: object, **options: object) -> object:
        child = began(*words, **options)  # type: ignore[call-overload]
        os.kill(child.pid, signal.SIGSTOP)
        return child

    monkeypatch.setattr(subprocess, "Popen", stopped)
    with pytest.raises(Timeout, match=r"could not be read within 0.2 s"):
        fetch(theirs, in_file(folder / "module"), threading.Event(), 0.2)
    over = threading.Event()
    over.set()
    with pytest.raises(Cancelled):
        fetch(theirs, in_file(folder / "module"), over)
