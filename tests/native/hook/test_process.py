"""The hook in real programs: it changes nothing, and shares memory as the driver does."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import UUID

import pytest

from phosd.engine.hook_client.wire import HEADER, MAGIC, VERSION, Type
from phosd.engine.program import process_gpus
from phosd.engine.system.native import hook_library
from phosd.unix_sockets import peer_of
from tests.native.hook.live import PRELUDE, linked, live
from tests.support.harness import PATIENCE, environment, running, users_hooks

PROGRAMS = Path(__file__).parent / "programs"

PROBE = """
from cuda.bindings import driver
def ok(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]
ok(driver.cuInit(0))
context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
ok(driver.cuCtxSetCurrent(context))
memory = [ok(driver.cuMemAlloc(1000 * i + 1)) for i in range(50)]
for i, at in enumerate(memory):
    ok(driver.cuMemsetD8(at, i, 1000 * i + 1))
values = bytearray(49001)
for at in memory:
    start, size = ok(driver.cuMemGetAddressRange(at))
    assert int(start) == int(at)
    ok(driver.cuMemcpyDtoH(values, at, size))
    print(size, sum(values))
    ok(driver.cuMemFree(at))
"""


def run(
    code: str, *, hooked: bool, runtime: Path, **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(hooked=hooked, runtime=runtime, extra=extra),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_program_prints_the_same_with_and_without_it(tmp_path: Path) -> None:
    """No daemon and no runtime folder: the program neither sees nor hears of it."""
    plain = run(PROBE, hooked=False, runtime=tmp_path)
    hooked = run(PROBE, hooked=True, runtime=tmp_path / "missing")
    assert plain.returncode == 0 and plain.stdout.count("\n") == 50
    assert (hooked.returncode, hooked.stdout, hooked.stderr) == (0, plain.stdout, plain.stderr)


def test_nothing_happens_before_cuinit_or_when_it_is_off(tmp_path: Path) -> None:
    users_hooks(tmp_path)
    look = (
        "import os, time\n{}\ntime.sleep(0.3)\n"
        "folder = os.environ['PHOS_RUNTIME_DIR'] + f'/hook/{{os.geteuid()}}'\n"
        "print(len(os.listdir('/proc/self/task')), os.listdir(folder))"
    )
    quiet = run(look.format("import cuda.bindings.driver"), hooked=True, runtime=tmp_path)
    assert quiet.stdout == "1 []\n", quiet.stderr
    off = run(
        look.format("from cuda.bindings import driver; driver.cuInit(0)"),
        hooked=True,
        runtime=tmp_path,
        PHOS_HOOK="off",
    )
    assert off.stdout.endswith(" []\n"), off.stderr
    listening = (
        "from cuda.bindings import driver; driver.cuInit(0)\n"
        "folder = os.environ['PHOS_RUNTIME_DIR'] + f'/hook/{os.geteuid()}'\n"
        "end = time.monotonic() + 50\n"
        "while not os.listdir(folder) and time.monotonic() < end: time.sleep(0.01)"
    )
    on = run(
        look.format(listening),
        hooked=True,
        runtime=tmp_path,
    )
    assert on.stdout.endswith(".sock']\n"), on.stderr


def test_it_calls_phosd_for_a_folder_to_listen_in(tmp_path: Path) -> None:
    """And has nothing to say; it listens as soon as its user has one."""
    folder = users_hooks(tmp_path)
    os.chown(folder, 1, 1)
    code = "import sys\nfrom cuda.bindings import driver; driver.cuInit(0); sys.stdin.read()"
    words, env = [sys.executable, "-c", code], environment(hooked=True, runtime=tmp_path)
    with socket.socket(socket.AF_UNIX) as phosd:
        phosd.bind(str(tmp_path / "program.sock"))
        phosd.listen()
        phosd.settimeout(PATIENCE)
        with running(words, env=env, stdin=subprocess.PIPE) as program:
            assert program.stdin is not None
            for _ in range(2):
                called, _ = phosd.accept()
                with called:
                    assert (peer_of(called), called.recv(1)) == ((program.pid, os.geteuid()), b"")
                assert not any(folder.iterdir())
            os.chown(folder, os.geteuid(), -1)
            with linked(program.pid, tmp_path) as link:
                assert link.hello().pid == program.pid
            program.stdin.close()


def test_it_needs_libc_alone_and_takes_few_names_but_the_drivers() -> None:
    dynamic = subprocess.run(
        ["readelf", "-d", hook_library()], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert needed <= {"libc.so.6", "ld-linux-x86-64.so.2"}
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", hook_library()], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    others = {name for name in names if not re.fullmatch(r"cu[A-Z]\w*", name)}
    parts = ("begin", "begin_named", "declare", "leave", "refuse", "wait", "wanted")  # phos.h
    expected = {"dlsym", "mmap", "mmap64", "syscall", *(f"phos_program_{part}" for part in parts)}
    assert "cuLaunchKernel_ptsz" in names and others == expected


VISIBLE = """
say(*(ok(driver.cuDeviceGetUuid(n)).bytes.hex() for n in range(2)))
sys.stdin.readline()
"""


def test_it_tells_the_devices_by_the_programs_own_numbers(tmp_path: Path) -> None:
    """Also when the program set CUDA_VISIBLE_DEVICES itself, which its /proc/environ hides."""
    names = [f"GPU-{UUID(bytes=b'phos-software-g' + bytes([n]))}" for n in range(3)]
    choose = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '2,0'\n"
    with live(VISIBLE, tmp_path, first=choose, PHOS_SOFTGPU_DEVICES="3") as program:
        seen = [f"GPU-{UUID(hex=device)}" for device in program.hears().split()]
        hello = program.link.hello()
        assert list(hello.devices) == seen == [names[2], names[0]]
        assert process_gpus.visible_gpus(program.process.pid) != [2, 0], "the test tests nothing"


def test_memory_shared_by_legacy_ipc(tmp_path: Path) -> None:
    users_hooks(tmp_path)
    env = environment(hooked=True, runtime=tmp_path)
    with running(
        [sys.executable, PROGRAMS / "ipc_owner.py"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        handles = "".join(owner.stdout.readline() for _ in range(3))
        peer = subprocess.run(
            [sys.executable, PROGRAMS / "ipc_peer.py"],
            env=env,
            input=handles,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (peer.stdout, peer.returncode) == ("True\n" * 3, 0), peer.stderr
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert [owner.stdout.readline() for _ in range(3)] == ["True\n"] * 3
        with linked(owner.pid, tmp_path) as link:
            assert not link.hello().uses_unsupported
        owner.stdin.write("\n")


EVENT = """
import ctypes
primary(0)
flags = driver.CUevent_flags
event = ok(driver.cuEventCreate(flags.CU_EVENT_INTERPROCESS | flags.CU_EVENT_DISABLE_TIMING))
ok(driver.cuEventRecord(event, 0))
handle = ok(driver.cuIpcGetEventHandle(event))
say(ctypes.string_at(handle.getPtr(), 64).hex())
sys.stdin.readline()
ok(driver.cuEventSynchronize(event))
say("reached")
sys.stdin.readline()
"""
OPENED = """
import ctypes
primary(0)
handle = driver.CUipcEventHandle()
given = bytes.fromhex(sys.argv[1])
ctypes.memmove(handle.getPtr(), given, len(given))
say(int(driver.cuIpcOpenEventHandle(handle)[0]))
"""


def test_an_event_is_opened_under_the_hook_only(tmp_path: Path) -> None:
    """Without it the handle means nothing; so does a driver's handle with it. Nobody is hurt."""

    def opens(handle: str, *, hooked: bool) -> int:
        env = environment(hooked=hooked, runtime=tmp_path)
        command = [sys.executable, "-c", PRELUDE + OPENED, handle]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    with live(EVENT, tmp_path) as program:
        handle = program.hears()
        assert opens(handle, hooked=False) != 0
        assert opens(bytes(64).hex(), hooked=True) != 0
        assert opens(handle, hooked=True) == 0
        program.tell()
        assert program.hears() == "reached"
        hello = program.link.hello()
        assert hello.parkable and not hello.uses_unsupported


_STRANGER = """
import os, socket, sys
user, path, hello = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(60)
connection.connect(path)
try:
    connection.sendall(hello)
    print(len(connection.recv(4096)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""


def test_it_answers_root_and_its_own_user_alone(tmp_path: Path) -> None:
    """Also if somebody else can reach its socket: it has been opened to all here."""
    hello = HEADER.pack(MAGIC, VERSION, Type.HELLO, 1, 0, 0, 0).hex()

    def answered(user: int, place: Path) -> int:
        command = ["/usr/bin/python3", "-S", "-c", _STRANGER, str(user), str(place), hello]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout)

    with tempfile.TemporaryDirectory(prefix="phos-open-") as name:
        runtime = Path(name)
        with live('say("up")\nsys.stdin.readline()\n', runtime) as program:
            assert program.hears() == "up"
            place = users_hooks(runtime) / f"{program.process.pid}.sock"
            for path in (runtime, place.parent.parent, place.parent):
                path.chmod(0o755)
            place.chmod(0o666)
            assert answered(0, place) > HEADER.size
            assert answered(65534, place) == 0
            assert answered(0, place) > HEADER.size
            program.tell()


MODULE = """
MODULE = b\"\"\"
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 8 .u64 plain;
.visible .global .attribute(.managed) .align 8 .u64 counter;
.visible .entry nothing() { ret; }
\\0\"\"\"
primary(0)
def default_managed_pool():
    anywhere = driver.CUmemLocation()
    anywhere.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_NONE
    kind = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
    return ok(driver.cuMemGetDefaultMemPool(anywhere, kind))
module = ok(driver.cuModuleLoadData(MODULE))
library = ok(driver.cuLibraryLoadData(MODULE, None, None, 0, None, None, 0))
ok(driver.cuModuleGetGlobal(module, b"plain"))
ok(driver.cuLibraryGetGlobal(library, b"plain"))
say("plain")
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "use",
    [
        "driver.cuMemAllocManaged(4096, 1)",
        "driver.cuModuleGetGlobal(module, b'counter')",
        "driver.cuLibraryGetGlobal(library, b'counter')",
        "driver.cuMemAllocFromPoolAsync(4096, default_managed_pool(), 0)",
    ],
)
def test_managed_memory_works_and_is_named(tmp_path: Path, use: str) -> None:
    code = f"{MODULE}ok({use})\nsay('managed')\nsys.stdin.readline()\n"
    with live(code, tmp_path) as program:
        assert program.hears() == "plain"
        assert program.link.hello().parkable
        program.tell()
        assert program.hears() == "managed"
        hello = program.link.hello()
        assert hello.uses_unsupported and not hello.parkable
        assert "managed memory" in hello.reason
        program.tell()
