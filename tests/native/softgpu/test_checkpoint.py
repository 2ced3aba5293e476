"""The driver's checkpoint API, between two processes."""

import ast
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.softgpu import program
from tests.support import device_files

# A program that counts on the device, and checks that the device still has what it put there.
COUNTER = """
context = use(); s = ck(d.cuStreamCreate(0)); n = 1 << 16
p = ck(d.cuMemAlloc(4 * n)); q = ck(d.cuMemAllocAsync(4 * n, s))
h = ck(d.cuMemCreate(2 << 20, properties(), 0)); va = map_memory(h, 2 << 20)
unmapped = ck(d.cuMemCreate(2 << 20, properties(), 0))
ck(d.cuMemsetD32(va, 0, n)); ck(d.cuCtxSynchronize())
print("ready")
for count in range(1, 1 << 30):
    ck(d.cuMemsetD32Async(p, count, n, s)); ck(d.cuMemcpyDtoDAsync(q, p, 4 * n, s))
    before = fetch(va, n); assert (before == count - 1).all(), (count, before)
    ck(d.cuMemcpyDtoDAsync(va, q, 4 * n, s)); ck(d.cuStreamSynchronize(s))
    print(count); time.sleep(0.001)
"""

CONTROLLER = """
ck(d.cuInit(0)); print("ready")
def lock(pid, ms=5000):
    a = d.CUcheckpointLockArgs(); a.timeoutMs = ms
    return d.cuCheckpointProcessLock(pid, a)
def restore(pid, pairs=()):
    a = d.CUcheckpointRestoreArgs()
    made = []
    for old, new in pairs:
        pair = d.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = ck(d.cuDeviceGetUuid(old)), ck(d.cuDeviceGetUuid(new))
        made.append(pair)
    a.gpuPairs, a.gpuPairsCount = made, len(made)
    return d.cuCheckpointProcessRestore(pid, a if made else None)
checkpoint = lambda pid: d.cuCheckpointProcessCheckpoint(pid, None)
unlock = lambda pid: d.cuCheckpointProcessUnlock(pid, None)
state = lambda pid: int(ck(d.cuCheckpointProcessGetState(pid)))
while True:
    print(eval(input()))
"""


class Controller:
    """A second process that asks for checkpoints."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.process = program.start(CONTROLLER, folder, (), **settings)
        assert program.line(self.process) == "ready"

    def ask(self, what: str) -> str:
        program.tell(self.process, what)
        return program.line(self.process)

    def do(self, call: str) -> str:
        return self.ask(f"code({call})")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def begin(
    code: str, folder: Path, processes: list[subprocess.Popen[str]], **settings: str
) -> tuple[subprocess.Popen[str], Controller]:
    target = program.start(code, folder, (), **settings)
    processes.append(target)
    controller = Controller(folder, **settings)
    processes.append(controller.process)
    assert program.line(target) == "ready"
    return target, controller


def counts_on(target: subprocess.Popen[str]) -> None:
    last = int(program.line(target))
    for _ in range(50):
        count = int(program.line(target))
        assert count == last + 1
        last = count


def test_the_states_follow_one_another(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    target, it = begin(COUNTER, tmp_path, processes)
    pid = target.pid
    wrong = "ERROR_ILLEGAL_STATE"
    assert it.ask(f"state({pid})") == "0"
    assert [it.do(f"{call}({pid})") for call in ("checkpoint", "restore", "unlock")] == [wrong] * 3
    assert it.do(f"lock({pid})") == "SUCCESS"
    assert it.ask(f"state({pid})") == "1"
    assert [it.do(f"{call}({pid})") for call in ("lock", "restore")] == [wrong] * 2
    assert it.do(f"checkpoint({pid})") == "SUCCESS"
    assert it.ask(f"state({pid})") == "2"
    assert [it.do(f"{call}({pid})") for call in ("lock", "checkpoint", "unlock")] == [wrong] * 3
    maps = Path(f"/proc/{pid}/maps").read_text()
    files = [str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir()]
    assert "memfd" not in maps and not any("memfd" in name for name in files)
    assert it.ask("use() and ck(d.cuMemGetInfo())[0] == ck(d.cuMemGetInfo())[1]") == "True"
    assert it.do(f"restore({pid})") == "SUCCESS"
    assert it.ask(f"state({pid})") == "1"
    assert it.do(f"unlock({pid})") == "SUCCESS"
    counts_on(target)
    thread = it.ask(f"ck(d.cuCheckpointProcessGetRestoreThreadId({pid}))")
    assert Path(f"/proc/{pid}/task/{thread}").exists()


def test_calls_block_while_locked(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    target, it = begin(
        "use(); print('ready'); input(); p = ck(d.cuMemAlloc(16)); print('done')",
        tmp_path,
        processes,
    )
    assert it.do(f"lock({target.pid})") == "SUCCESS"
    program.tell(target, "")
    assert target.stdout is not None
    assert select.select([target.stdout], [], [], 0.2)[0] == []
    assert it.do(f"unlock({target.pid})") == "SUCCESS"
    assert program.line(target) == "done"


def test_a_lock_waits_for_work_and_gives_up_in_time(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    target, it = begin(
        """
use(); s, t = ck(d.cuStreamCreate(1)), ck(d.cuStreamCreate(1)); flag = ck(d.cuMemAlloc(8))
ck(d.cuMemsetD32(flag, 0, 2)); ck(d.cuCtxSynchronize())
ck(d.cuStreamWaitValue32(s, flag, 1, 0)); ck(d.cuMemsetD32Async(int(flag) + 4, 8, 1, s))
print("ready"); input(); ck(d.cuStreamWriteValue32(t, flag, 1, 0)); ck(d.cuStreamSynchronize(t))
print("written"); input(); print(fetch(int(flag) + 4, 1)[0])
""",
        tmp_path,
        processes,
    )
    assert it.do(f"lock({target.pid}, 100)") == "ERROR_NOT_READY"
    assert it.ask(f"state({target.pid})") == "0"
    program.tell(target, "")
    assert program.line(target) == "written"
    assert it.do(f"lock({target.pid})") == "SUCCESS"
    assert it.do(f"checkpoint({target.pid})") == "SUCCESS"
    assert it.do(f"restore({target.pid})") == "SUCCESS"
    assert it.do(f"unlock({target.pid})") == "SUCCESS"
    program.tell(target, "")
    assert program.line(target) == "8"


def test_imports_make_the_restore_fail_for_good(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    target, it = begin(
        """
use(); h = ck(d.cuMemCreate(2 << 20, properties(), 0))
fd = ck(d.cuMemExportToShareableHandle(h, FD, 0)); i = ck(d.cuMemImportFromShareableHandle(fd, FD))
os.close(int(fd)); print("ready"); input()
""",
        tmp_path,
        processes,
    )
    assert it.do(f"lock({target.pid})") == "SUCCESS"
    assert it.do(f"checkpoint({target.pid})") == "SUCCESS"
    assert it.do(f"restore({target.pid})") == "ERROR_NOT_SUPPORTED"
    assert it.ask(f"state({target.pid})") == "2"
    assert it.do(f"restore({target.pid})") == "ERROR_OPERATING_SYSTEM"


def test_managed_memory_is_refused_and_nothing_is_lost(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    target, it = begin(
        "m = use() and ck(d.cuMemAllocManaged(4096, 1))\n" + COUNTER, tmp_path, processes
    )
    assert it.do(f"lock({target.pid})") == "SUCCESS"
    assert it.do(f"checkpoint({target.pid})") == "ERROR_NOT_SUPPORTED"
    assert it.ask(f"state({target.pid})") == "1"
    assert it.do(f"unlock({target.pid})") == "SUCCESS"
    counts_on(target)


def test_a_restore_needs_the_memory(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    target, it = begin(COUNTER, tmp_path, processes, PHOS_SOFTGPU_MEMORY="16M")
    assert it.do(f"lock({target.pid})") == "SUCCESS"
    assert it.do(f"checkpoint({target.pid})") == "SUCCESS"
    assert it.ask("use() and ck(d.cuMemAlloc(12 << 20)) is not None") == "True"
    assert it.do(f"restore({target.pid})") == "ERROR_OUT_OF_MEMORY"
    assert it.ask(f"state({target.pid})") == "2"
    assert it.do(f"restore({target.pid})") == "ERROR_OPERATING_SYSTEM"


def test_a_restore_on_another_gpu_names_every_gpu(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    target, it = begin(COUNTER, tmp_path, processes, PHOS_SOFTGPU_DEVICES="2")
    assert it.do(f"lock({target.pid})") == "SUCCESS"
    assert it.do(f"checkpoint({target.pid})") == "SUCCESS"
    assert it.do(f"restore({target.pid}, [(0, 1)])") == "ERROR_INVALID_VALUE"
    assert it.do(f"restore({target.pid}, [(0, 1), (1, 1)])") == "ERROR_INVALID_VALUE"
    assert it.do(f"restore({target.pid}, [(0, 1), (1, 0)])") == "SUCCESS"
    assert it.do(f"unlock({target.pid})") == "SUCCESS"
    counts_on(target)
    free = "(lambda m: m[1] - m[0])(ck(d.cuMemGetInfo()))"
    assert it.ask(f"use(0) and {free}") == "0"
    assert int(it.ask(f"use(1) and {free}")) > 0


def test_a_moved_process_is_told_its_new_gpu_but_for_the_pci_bus(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """As two H200s do it (r580): the UUID is the new GPU's, the PCI bus id the old one's."""
    code = """
use(); it = lambda n: (bytes(ck(d.cuDeviceGetUuid(n)).bytes).hex(),
                       ck(d.cuDeviceGetPCIBusId(13, n)).split(b"\\0")[0].decode())
print("ready")
while input() != "end": print(it(0), it(1))
"""
    target, it = begin(code, tmp_path, processes, PHOS_SOFTGPU_DEVICES="2")

    def told() -> list[tuple[str, str]]:
        program.tell(target, "")
        return list(ast.literal_eval(program.line(target).replace(") (", "), (")))

    (uuid_0, bus_0), (uuid_1, bus_1) = told()
    assert uuid_0 != uuid_1 and bus_0 != bus_1
    for there in (True, False):
        assert it.do(f"lock({target.pid})") == "SUCCESS"
        assert it.do(f"checkpoint({target.pid})") == "SUCCESS"
        assert it.do(f"restore({target.pid}, [(0, 1), (1, 0)])") == "SUCCESS"
        assert it.do(f"unlock({target.pid})") == "SUCCESS"
        uuids = (uuid_1, uuid_0) if there else (uuid_0, uuid_1)
        assert told() == [(uuids[0], bus_0), (uuids[1], bus_1)]


def test_the_state_of_who_is_no_gpu_process(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    _, it = begin("use(); print('ready'); input()", tmp_path, processes)
    assert it.do("d.cuCheckpointProcessGetState(1)") == "ERROR_NOT_INITIALIZED"
    for pid in (-1, 0, 2**22 + 5):
        assert it.do(f"d.cuCheckpointProcessGetState({pid})") == "ERROR_OPERATING_SYSTEM"


POOL = """
use(); p = d.CUmemPoolProps()
p.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
p.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; p.handleTypes = FD
pool = ck(d.cuMemPoolCreate(p)); handle = int(ck(d.cuMemPoolExportToShareableHandle(pool, FD, 0)))
"""
IMPORTED = (
    POOL
    + """
other = ck(d.cuMemPoolImportFromShareableHandle(handle, FD, 0))
print("ready"); input()
"""
)
OWN = (
    POOL
    + """
os.close(handle); print("ready"); input()
"""
)


@pytest.mark.parametrize("imported", [False, True])
def test_a_pool_that_can_be_exported_keeps_a_device(
    tmp_path: Path,
    processes: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    imported: bool,
) -> None:
    """As the driver's (H100, 580.159); the restore of a process that has imported one fails."""
    device = device_files.pretend(tmp_path, monkeypatch)
    code, settings = IMPORTED if imported else OWN, {"PHOS_SOFTGPU_DEVICE_FILE": str(device)}
    target, it = begin(code, tmp_path, processes, **settings)
    assert it.do(f"lock({target.pid})") == "SUCCESS"
    assert it.do(f"checkpoint({target.pid})") == "SUCCESS"
    assert not device_files.mapped(target.pid, device)
    assert device_files.opened(target.pid, device)
    answer = it.do(f"restore({target.pid})")
    assert answer == ("ERROR_OPERATING_SYSTEM" if imported else "SUCCESS")
