"""What users may try while their program is restored, with the race made certain."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phosd.engine.criu.dump import dump as criu_dump
from phosd.engine.criu.dump import landlock
from phosd.engine.criu.dump.check import check
from phosd.engine.criu.dump.dump import Dump, DumpOptions
from phosd.engine.criu.dump.dumps import CpuParts
from phosd.engine.criu.images import rseq_areas
from phosd.engine.criu.images.digests import digests
from phosd.engine.criu.images.image_file import Field, ImageFile, message
from phosd.engine.criu.images.pagemap import Pagemap
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.admission import require_restorable
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restored_processes import ENDED_SECONDS
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.run.page_store import PageStore
from phosd.engine.criu.run.program import Criu
from phosd.engine.image.store import Store
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program.tree import scan
from phosd.engine.system import privileges, procfs
from phosd.errors import Internal, NoSuchProcess, NotAuthorized, PhosError, Timeout, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, records, wait_for

OTHER = USER + 1

IN_A_FOLDER = (
    """
import os, sys
os.chdir(sys.argv[1])
kept = open("letter")
"""
    + COUNTER
)


@pytest.fixture
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder below another user's closed one, named by a process of theirs that is in it."""
    closed = tmp_path_factory.mktemp("closed")
    folder = closed / "open"
    folder.mkdir(mode=0o755)
    (folder / "letter").write_text("of a user's\n")
    for path in (closed, folder, folder / "letter"):
        os.chown(path, OTHER, OTHER)
    process = subprocess.Popen(["/bin/sleep", "1000"], cwd=folder, user=OTHER, group=OTHER)
    yield f"/proc/{process.pid}/cwd"
    process.kill()
    process.wait()


def test_no_folder_of_others_is_entered(
    lives: Callable[[int], Life], inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's folder becomes a link through another user's process when CRIU opens it."""
    life = lives(USER)
    folder = life.home / "folder"
    folder.mkdir()
    (folder / "letter").write_text("of a user's\n")
    life.start(IN_A_FOLDER, str(folder))
    life.counts_on()
    life.dump()
    life.kill()
    run = criu_restore._Run.restore

    def swapped(*arguments: Any) -> None:
        folder.rename(life.home / "moved")
        folder.symlink_to(inside)
        run(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(criu_restore._Run, "restore", swapped)
        with pytest.raises(Internal, match="Permission denied"):
            life.restore()
    wait_for(lambda: procfs.stat(life.pid) is None)
    folder.unlink()
    (life.home / "moved").rename(folder)
    life.restore()
    life.counts_on()


CODE = 0x620000000
"""Where the program of the next test has code for CRIU's parasite."""
GIVEN = 1 << 21  # CAP_SYS_ADMIN

TAMPERED = (
    f"""
import ctypes, mmap
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
assert libc.mmap({CODE}, 4096, 7, 0x32, -1, 0) == {CODE}  # private, fixed, of nobody
capget = b"".join((
    b"\\xb8" + ({GIVEN}).to_bytes(4, "little"),  # mov eax, the capability
    b"\\x89\\x06\\x89\\x46\\x04",  # mov [rsi], eax; mov [rsi+4], eax: effective, permitted
    b"\\x31\\xc0",  # xor eax, eax
    b"\\x89\\x46\\x08\\x89\\x46\\x0c\\x89\\x46\\x10\\x89\\x46\\x14",  # the other words
    b"\\xc3",  # ret
))
ctypes.memmove({CODE}, capget, len(capget))
"""
    + COUNTER
)
CAPGET = b"\xb8\x7d\0\0\0\xe9"
"""How the system call begins in CRIU's parasite: mov eax, its number; jmp."""


@pytest.fixture
def tampered(criu: Criu, tmp_path_factory: pytest.TempPathFactory) -> Criu:
    """A CRIU whose parasite gets what the program's code says for its capabilities.

    It is as if the user had changed the parasite in the program's memory at the right moment.
    """
    folder = tmp_path_factory.mktemp("criu")
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.getuid():
            each.chmod(each.stat().st_mode | 0o011)
    program = bytearray(criu.path.read_bytes())
    jump = b"\x48\xb8" + CODE.to_bytes(8, "little") + b"\xff\xe0"  # mov rax, the code; jmp rax
    assert program.count(CAPGET) == 2, "in the parasite and in the restorer"
    at = program.find(CAPGET)
    while at >= 0:
        program[at : at + len(jump)] = jump
        at = program.find(CAPGET)
    (folder / "criu").write_bytes(program)
    (folder / "criu").chmod(0o755)
    return Criu(folder / "criu")


def test_what_a_parasite_says_that_was_changed_is_not_believed(
    lives: Callable[[int], Life], tampered: Criu
) -> None:
    life = lives(USER)
    life.start(TAMPERED)
    life.counts_on()
    own, life.criu = life.criu, tampered
    with pytest.raises(NotAuthorized, match="has other permitted for thread"):
        life.dump()
    life.counts_on()
    shutil.rmtree(life.images)
    life.criu = own
    life.again()
    life.counts_on()


ALONE = 5_000_000 + os.getpid()
"""The user of the next tests: all that is theirs is from here."""
AREA = 0x610000000
"""Where the program of the next tests has its rseq area: 32 bytes, aligned."""
SECTION = 8
"""Where in an area the address of a critical section is."""

RSEQ = (
    f"""
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.syscall.restype = ctypes.c_void_p, ctypes.c_long
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
descriptor = os.open(sys.argv[1], os.O_RDWR)
kind = getattr(mmap, sys.argv[2]) | 0x10  # fixed
assert libc.mmap({AREA}, 4096, 3, kind, descriptor, 0) == {AREA}
os.close(descriptor)
assert libc.syscall(334, ctypes.c_void_p({AREA}), 32, 0, 0x53053053) == 0, ctypes.get_errno()
"""
    + COUNTER
)


@pytest.fixture
def page() -> Iterator[Path]:
    """A user's page that several processes may map."""
    path = Path(f"/dev/shm/phos-test-rseq-{os.getpid()}")
    path.write_bytes(bytes(4096))
    os.chown(path, ALONE, ALONE)
    yield path
    path.unlink(missing_ok=True)


def start_with_area(life: Life, page: Path, kind: str) -> None:
    """Start a program whose only rseq area is in this page."""
    without = os.environ | {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
    life.start(RSEQ, str(page), kind, env=without)
    life.counts_on()


def test_nobody_else_writes_to_what_leads_the_kernel_out_of_the_restorer(
    lives: Callable[[int], Life], page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU's restorer registers the program's rseq area while it has capabilities. If another
    process could write there, the kernel would jump into the program's code in the middle of the
    restorer: such a program is not saved, and an image that has one is not restored.
    """
    life = lives(ALONE)
    start_with_area(life, page, "MAP_SHARED")
    with pytest.raises(Unsupported, match=rf"thread {life.pid} has its area .*{AREA:#x}"):
        life.dump()
    life.counts_on()
    wait_for(lambda: not able())
    shutil.rmtree(life.images)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(rseq_areas, "require_own", lambda _: None)
        life.dump()
    life.kill()
    with pytest.raises(Unsupported, match=rf"thread {life.pid} has its area .*{AREA:#x}"):
        life.restore()
    assert procfs.stat(life.pid) is None
    wait_for(lambda: not able())


def able() -> list[int]:
    """The user's processes that have any capability."""
    found = []
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            each = procfs.credentials(pid)
            if ALONE in each.uids and each.permitted | each.effective | each.ambient:
                found.append(pid)
    return found


def test_no_critical_section_is_in_an_image(
    lives: Callable[[int], Life], page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the kernel led out of the restorer by what was saved in private memory: whatever was
    there when CRIU looked is cleared, and an image that has something is not restored.
    """
    life = lives(ALONE)
    start_with_area(life, page, "MAP_PRIVATE")
    settle = Dump.settle

    def with_section(dump: Dump) -> None:
        settle(dump)
        write_section(life.images, life.pid, 0x5000)

    monkeypatch.setattr(Dump, "settle", with_section)
    life.dump()
    life.kill()
    life.restore()
    life.counts_on()
    os.kill(life.pid, signal.SIGKILL)
    wait_for(lambda: procfs.stat(life.pid) is None)
    write_section(life.images, life.pid, 0x5000)
    with pytest.raises(Unsupported, match=f"critical section .* of thread {life.pid}"):
        life.restore()
    assert procfs.stat(life.pid) is None


def test_nor_in_an_image_whose_pages_were_elsewhere(
    lives: Callable[[int], Life], page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, while the program stood still."""
    life = lives(ALONE)
    start_with_area(life, page, "MAP_PRIVATE")
    complete = PageStore.complete

    def with_section(store: PageStore, dump: Path, copy: Path) -> None:
        complete(store, dump, copy)
        write_section(copy, life.pid, 0x5000)

    monkeypatch.setattr(PageStore, "complete", with_section)
    for name in ("state", "staging"):
        (tmp_path / name).mkdir(mode=0o700)
    with (
        Store(tmp_path / "state").begin(0) as writer,
        CpuParts(life.criu, writer, tmp_path / "staging", DumpOptions(), 64 << 20) as parts,
    ):
        parts.prepare([scan(life.pid)])
        parts.dump(Cancellation())
        (record,) = parts.persist()
        saved = SavedTree(record, records(parts.trees[0]), writer.folder / record.folder)
        require_restorable(life.criu, saved)
        saved.check_bytes()


def test_an_image_with_rings_of_aio_is_not_restored(lives: Callable[[int], Life]) -> None:
    """CRIU would put them back by what their memory says."""
    life = lives(ALONE)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    path = life.images / f"mm-{life.pid}.img"
    found = ImageFile.read(path)
    ring = message([Field.of(1, AREA), Field.of(2, 64), Field.of(3, 4096)])
    ImageFile(found.magic, (found.messages[0] + message([Field.of(16, ring)]),)).write(path)
    assert life.record is not None
    life.record = msgspec.structs.replace(life.record, files=digests(life.images))
    with pytest.raises(Unsupported, match="rings of AIO"):
        life.restore()


def write_section(folder: Path, pid: int, address: int) -> None:
    """Change CRIU's images: the area of a process names a critical section."""
    saved = Pagemap.read(folder / f"pagemap-{pid}.img")
    position = saved.position(AREA + SECTION)
    assert position is not None
    with (folder / f"pages-{saved.pages}.img").open("r+b") as pages:
        pages.seek(position)
        pages.write(address.to_bytes(8, "little"))


def test_every_thread_of_an_ordinary_program_has_an_area(lives: Callable[[int], Life]) -> None:
    """Else the tests above would be about programs that there are not."""
    life = lives(ALONE)
    life.start(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(999,), daemon=True).start()\n" + COUNTER
    )
    life.counts_on()
    threads = procfs.threads(life.pid)
    life.dump()
    found = {area.thread: area.process for area in rseq_areas.areas(life.images)}
    assert found == dict.fromkeys(threads, life.pid)
    life.kill()
    life.restore()
    life.counts_on()


def test_criu_does_not_wait_for_what_it_has_collected(lives: Callable[[int], Life]) -> None:
    """A task is killed while CRIU holds all, and CRIU goes on: it then waits for its threads."""
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    life.admit()

    def killed() -> bool:
        found = procfs.stat(life.pid)
        if found is not None and found.name != "criu":
            os.kill(life.pid, signal.SIGKILL)
        return True

    began = time.monotonic()
    with pytest.raises(Internal, match=r"ended|criu restore failed"):
        criu_restore.restore_tree(life.criu, life.saved_tree, TreeRestoreOptions(), complete=killed)
    assert time.monotonic() - began < ENDED_SECONDS + 10, "CRIU waited for what has ended"


SHADOWING = (
    """
import ctypes, os, signal, sys

def shadow(*_):
    libc = ctypes.CDLL(None)
    assert libc.unshare(0x10000000 | 0x00020000) == 0  # user and mount namespaces
    assert libc.mount(sys.argv[1].encode(), sys.argv[2].encode(), None, 4096, None) == 0  # bind
    os.mkdir(sys.argv[1] + "/done")

signal.signal(signal.SIGUSR1, shadow)
"""
    + COUNTER
)


def test_no_program_that_a_user_puts_in_criu_s_place_gets_its_capabilities(
    lives: Callable[[int], Life], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in a pid namespace of phosd's gets itself a mount namespace, just after it was
    looked at, where it mounts what it likes; root must look for CRIU elsewhere.
    """
    life = lives(USER)
    life.criu = Criu.find(runtime_dir=tmp_path / "run")
    (tmp_path / "run" / "hook").mkdir(parents=True)
    own = life.home / "own"
    own.mkdir()
    os.chown(own, USER, USER)
    false_criu = own / life.criu.path.name
    false_criu.write_text(f"#!/bin/sh\ngrep CapEff /proc/self/status >{own}/caught\n")
    false_criu.chmod(0o755)
    life.start(SHADOWING, str(own), str(life.criu.path.parent))
    life.counts_on()
    life.dump()
    life.kill()
    inside = life.restore(pid_namespace=True)
    life.counts_on()
    look = check

    def then_changed(*arguments: Any) -> Any:
        found = look(*arguments)
        os.kill(inside.pid, signal.SIGUSR1)
        wait_for((own / "done").is_dir)
        return found

    monkeypatch.setattr(criu_dump, "check", then_changed)
    with pytest.raises(PhosError) as refused:
        (tmp_path / "again").mkdir()
        criu_dump.dump_tree(life.criu, scan(inside.pid), tmp_path / "again", DumpOptions())
    assert not (own / "caught").exists(), (own / "caught").read_text()
    assert "in a container or sandbox" in str(refused.value)
    life.counts_on()


@pytest.mark.parametrize(
    ("does", "patience", "error"),
    [("sleep 600", 100, Timeout), ("yes >$0", 60_000, NoSuchProcess)],
)
def test_a_bystander_that_is_stopped_or_says_anything_holds_up_nobody(
    does: str, patience: int, error: type[PhosError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may do both: it is the one process that phosd starts and listens to."""
    monkeypatch.setattr(landlock, "_ANSWER_MILLISECONDS", patience)
    monkeypatch.setattr(
        privileges, "command", lambda words, **_: ["/bin/sh", "-c", does, words[-1]]
    )
    own = scan(os.getpid()).root
    with pytest.raises(error), landlock._bystander(Criu.find(), own):
        pass
