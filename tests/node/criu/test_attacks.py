"""What users may try while their program is restored, with the race made certain."""

import contextlib
import functools
import operator
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.criu import dump as criu_dump
from phosd.engine.criu import landlock
from phosd.engine.criu import restore as criu_restore
from phosd.engine.criu.dump import DumpOptions
from phosd.engine.criu.made_processes import ENDED_SECONDS
from phosd.engine.criu.program import Criu
from phosd.engine.criu.restore import TreeRestoreOptions
from phosd.engine.program.tree import scan
from phosd.engine.system import privileges, procfs
from phosd.engine.system.privileges import Capability
from phosd.errors import Internal, NoSuchProcess, NotAuthorized, PhosError, Timeout
from tests.node.criu.life import COUNTER, SYSTEM_PYTHON, USER, Life, wait_for

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
    run = criu_restore._run

    def swapped(*arguments: Any) -> None:
        folder.rename(life.home / "moved")
        folder.symlink_to(inside)
        run(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(criu_restore, "_run", swapped)
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


AREA = 0x610000000
"""Where the program of the next test has its rseq area: 32 bytes, aligned."""
SECTION, HEADER, SETS, DONE = 0x40, 0x100, 0x110, 0x180
"""In that page: the critical section, what ``capget`` is given and gives, and whether it ran."""

RSEQ = (
    f"""
import ctypes, mmap, os, socket, struct, sys, time
if sys.argv[2:]:  # a connection within the program, with bytes under way
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    far.sendall(bytes(1000))
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.syscall.restype = ctypes.c_void_p, ctypes.c_long
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
descriptor = os.open(sys.argv[1], os.O_RDWR)
assert libc.mmap({AREA}, 4096, 3, 0x11, descriptor, 0) == {AREA}  # shared, fixed
os.close(descriptor)
code = libc.mmap(0, 4096, 7, 0x22, -1, 0)
handler = b"".join((
    struct.pack("<I", 0x53053053),  # the signature, without which the kernel does not jump
    b"\\x48\\xbf" + struct.pack("<Q", {AREA + HEADER}),  # mov rdi, the header
    b"\\x48\\xbe" + struct.pack("<Q", {AREA + SETS}),  # mov rsi, the sets
    b"\\xb8\\x7d\\0\\0\\0\\x0f\\x05",  # capget
    b"\\x48\\xbf" + struct.pack("<Q", {AREA + DONE}) + b"\\xc6\\x07\\x01",  # mov byte [rdi], 1
    b"\\xb8\\x3c\\0\\0\\0\\x0f\\x05",  # exit
))
ctypes.memmove(code, handler, len(handler))
page = bytearray(4096)
struct.pack_into("<II", page, 0, 0, 0xFFFFFFFF)  # no CPU yet
struct.pack_into("<IIQQQ", page, {SECTION}, 0, 0, 0x1000, 0x500000000000, code + 4)
struct.pack_into("<Ii", page, {HEADER}, 0x20080522, 0)
ctypes.memmove({AREA}, bytes(page), len(page))
assert libc.syscall(334, ctypes.c_void_p({AREA}), 32, 0, 0x53053053) == 0, ctypes.get_errno()
"""
    + COUNTER
)

WRITER = f"""
import mmap, os, struct, sys
old = os.stat(sys.argv[1]).st_ino
print("ready", flush=True)
while True:
    try:
        if os.stat(sys.argv[1]).st_ino != old:
            file = os.open(sys.argv[1], os.O_RDWR)
            break
    except OSError:
        pass
page = mmap.mmap(file, 4096)
section = struct.pack("<Q", {AREA + SECTION})
while not page[{DONE}]:
    page[8:16] = section
print(*struct.unpack_from("<6I", page, {SETS}), flush=True)
"""


TRIES = 6
"""One in two meets the restorer; the others meet the program, which has no capabilities."""
MAY_BE_HAD = 1 << Capability.CHECKPOINT_RESTORE | 1 << Capability.SETPCAP


@pytest.fixture
def pages() -> Iterator[list[Path]]:
    """Pages of the user's that several processes may map."""
    made = [Path(f"/dev/shm/phos-test-rseq-{os.getpid()}-{number}") for number in range(TRIES)]
    for path in made:
        path.write_bytes(bytes(4096))
        os.chown(path, USER, USER)
    yield made
    for path in made:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("words", [(), ("connected",)], ids=["alone", "connected"])
def test_who_takes_the_restorer_over_has_nothing_to_gain(
    lives: Callable[[int], Life], pages: list[Path], words: tuple[str, ...]
) -> None:
    """CRIU's restorer registers the program's rseq area while it has capabilities.

    The area is in memory that a process of the user's writes to: the kernel then jumps into the
    program's code in the middle of the restorer. What that code has is what CRIU was given: also
    for a program with TCP connections it is not what would put a socket in repair mode.
    """
    for page in pages:
        gained = taken_over(lives(USER), page, *words)
        assert gained & ~MAY_BE_HAD == 0
        if gained:
            return


def taken_over(life: Life, page: Path, *arguments: str) -> int:
    """Restore a program and take its restorer over. Returns all capabilities that this gave."""
    without_rseq = os.environ | {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
    life.start(RSEQ, str(page), *arguments, env=without_rseq)
    life.counts_on()
    life.dump()
    life.kill()
    with subprocess.Popen(
        [SYSTEM_PYTHON, "-c", WRITER, str(page)],
        stdout=subprocess.PIPE,
        text=True,
        user=USER,
        group=USER,
        extra_groups=[],
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            began = time.monotonic()
            with contextlib.suppress(Internal):  # its restorer is no more
                life.restore()
            assert time.monotonic() - began < ENDED_SECONDS + 10, "CRIU waited for what has ended"
            if not select.select([writer.stdout], [], [], 1)[0]:
                return 0  # nor was the program taken over after it
            words = [int(word) for word in writer.stdout.readline().split()]
        finally:
            writer.kill()
    low, high = (functools.reduce(operator.or_, sets) for sets in (words[:3], words[3:]))
    return low | high << 32


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
    look = criu_dump.check

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


@pytest.mark.parametrize(("does", "error"), [("sleep 60", Timeout), ("yes >$0", NoSuchProcess)])
def test_a_bystander_that_is_stopped_or_says_anything_holds_up_nobody(
    does: str, error: type[PhosError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may do both: it is the one process that phosd starts and listens to."""
    monkeypatch.setattr(landlock, "_ANSWER_MILLISECONDS", 100)
    monkeypatch.setattr(
        privileges, "command", lambda words, **_: ["/bin/sh", "-c", does, words[-1]]
    )
    own = scan(os.getpid()).root
    with pytest.raises(error), landlock._bystander(Criu.find(), own):
        pass
