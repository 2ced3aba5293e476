"""Allocations, mappings, sharing and accounting."""

from pathlib import Path

import pytest

from tests.native.softgpu import program


def test_mappings_follow_the_drivers_rules(tmp_path: Path) -> None:
    out = program.run(
        """
use()
MB = 1 << 20
h = ck(d.cuMemCreate(4 * MB, properties(), 0))
print(code(d.cuMemCreate(3 * MB, properties(), 0)))
va = int(ck(d.cuMemAddressReserve(16 * MB, 0, 0, 0)))
ck(d.cuMemMap(va, 4 * MB, 0, h, 0))
print(code(d.cuMemMap(va + 2 * MB, 4 * MB, 0, h, 0)), code(d.cuMemAddressFree(va, 16 * MB)))
ck(d.cuMemSetAccess(va, 4 * MB, [access()], 1))
ck(d.cuMemMap(va + 8 * MB, 4 * MB, 0, h, 0))
ck(d.cuMemSetAccess(va + 8 * MB, 4 * MB, [access()], 1))
ck(d.cuMemsetD32(va, 7, MB))
assert (fetch(va + 8 * MB, MB) == 7).all()          # one memory at two addresses
ck(d.cuMemRelease(h))
print(code(d.cuMemRelease(h)))
assert int(ck(d.cuMemRetainAllocationHandle(va))) == int(h)
ck(d.cuMemRelease(h))
print(code(d.cuMemUnmap(va, 2 * MB)))
ck(d.cuMemUnmap(va, 4 * MB)); ck(d.cuMemUnmap(va + 8 * MB, 4 * MB))
ck(d.cuMemAddressFree(va, 16 * MB))
p = ck(d.cuMemAlloc(100))
print(code(d.cuMemRetainAllocationHandle(int(p))), ck(d.cuMemGetAddressRange(p))[1])
print(ck(d.cuMemGetInfo()))
""",
        tmp_path,
        PHOS_SOFTGPU_MEMORY="64M",
    ).split("\n")
    assert out[:5] == [
        "ERROR_INVALID_VALUE",
        "ERROR_INVALID_VALUE ERROR_INVALID_VALUE",
        "ERROR_INVALID_VALUE",
        "ERROR_INVALID_VALUE",
        "ERROR_INVALID_VALUE 100",
    ]
    assert out[5] == str(((62 << 20), (64 << 20)))


def test_an_unmapped_touch_breaks_the_context(tmp_path: Path) -> None:
    out = program.run(
        """
use()
va = int(ck(d.cuMemAddressReserve(4 << 20, 0, 0, 0)))
print(code(d.cuMemsetD8(0x6f7000000000, 1, 16)), code(d.cuCtxSynchronize()))
ck(d.cuMemsetD8(va, 1, 16))
print(code(d.cuCtxSynchronize()), code(d.cuMemAlloc(16)), code(d.cuStreamCreate(0)))
ck(d.cuDevicePrimaryCtxReset(0)); use()
ck(d.cuMemAlloc(16))
""",
        tmp_path,
    ).split("\n")
    assert out[0] == "ERROR_INVALID_VALUE SUCCESS"
    assert out[1] == " ".join(["ERROR_ILLEGAL_ADDRESS"] * 3)


def test_memory_is_shared_and_outlives_its_maker(tmp_path: Path) -> None:
    """An export is the same memory in another process, counts once, and cannot be passed on."""
    maker = program.start(
        """
use()
h = ck(d.cuMemCreate(4 << 20, properties(), 0)); va = map_memory(h, 4 << 20)
ck(d.cuMemsetD32(va, 41, 1 << 20)); ck(d.cuCtxSynchronize())
import socket
s = socket.socket(fileno=int(os.environ["CHANNEL"]))
socket.send_fds(s, [b"x"], [int(ck(d.cuMemExportToShareableHandle(h, FD, 0)))])
print("sent"); input()
print(fetch(va, 1)[0])
""",
        tmp_path,
        pass_fds=(fds := _pair())[:1],
        CHANNEL=str(fds[0]),
        PHOS_SOFTGPU_MEMORY="64M",
    )
    assert program.line(maker) == "sent"
    taker = program.start(
        """
use()
import socket
s = socket.socket(fileno=int(os.environ["CHANNEL"]))
_, got, _, _ = socket.recv_fds(s, 1, 1)
h = ck(d.cuMemImportFromShareableHandle(got[0], FD)); os.close(got[0])
va = map_memory(h, 4 << 20)
print(fetch(va, 1)[0], code(d.cuMemExportToShareableHandle(h, FD, 0)), ck(d.cuMemGetInfo())[0])
ck(d.cuMemsetD32(va, 42, 1 << 20)); ck(d.cuCtxSynchronize())
print("written"); input()
print(fetch(va, 1)[0], ck(d.cuMemGetInfo())[0])
ck(d.cuMemUnmap(va, 4 << 20)); ck(d.cuMemRelease(h)); print(ck(d.cuMemGetInfo())[0])
""",
        tmp_path,
        pass_fds=fds[1:],
        CHANNEL=str(fds[1]),
        PHOS_SOFTGPU_MEMORY="64M",
    )
    assert program.line(taker) == f"41 ERROR_INVALID_VALUE {60 << 20}"
    assert program.line(taker) == "written"
    program.tell(maker, "")
    assert program.line(maker) == "42"
    assert maker.wait(20) == 0
    program.tell(taker, "")
    assert program.line(taker) == f"42 {60 << 20}"
    assert program.line(taker) == str(64 << 20)
    assert taker.wait(20) == 0


def _pair() -> tuple[int, int]:
    import socket

    left, right = socket.socketpair()
    return left.detach(), right.detach()


def test_memory_is_one_pool_for_all_processes(tmp_path: Path) -> None:
    hog = program.start(
        "use(); p = ck(d.cuMemAlloc(40 << 20)); print('has'); input()",
        tmp_path,
        PHOS_SOFTGPU_MEMORY="64M",
    )
    assert program.line(hog) == "has"
    code = "use(); print(code(d.cuMemAlloc(40 << 20)), ck(d.cuMemGetInfo())[0])"
    out = program.run(code, tmp_path, PHOS_SOFTGPU_MEMORY="64M")
    assert out == f"ERROR_OUT_OF_MEMORY {24 << 20}\n"
    hog.kill()  # a dead process gives back what it had
    hog.wait()
    out = program.run(code, tmp_path, PHOS_SOFTGPU_MEMORY="64M")
    assert out == f"SUCCESS {24 << 20}\n"


def test_ten_thousand_small_allocations_share_segments(tmp_path: Path) -> None:
    program.run(
        """
use()
before = len(os.listdir("/proc/self/fd"))
all = [int(ck(d.cuMemAlloc(4096))) for _ in range(10000)]
assert len(set(all)) == 10000
assert len(os.listdir("/proc/self/fd")) == before
free, total = ck(d.cuMemGetInfo())
assert total - free <= 44 << 20, total - free
for p in all: ck(d.cuMemFree(p))
assert ck(d.cuMemGetInfo())[0] == total
assert code(d.cuMemFree(all[0])) == "ERROR_INVALID_VALUE"
""",
        tmp_path,
    )


def test_pinned_and_managed_memory(tmp_path: Path) -> None:
    program.run(
        """
use()
pinned = int(ck(d.cuMemAllocHost(4096)))
view = np.ctypeslib.as_array((ctypes.c_uint32 * 1024).from_address(pinned))
p = ck(d.cuMemAlloc(4096)); s = ck(d.cuStreamCreate(0))
ck(d.cuMemsetD32Async(p, 9, 1024, s)); ck(d.cuMemcpyDtoHAsync(pinned, p, 4096, s))
ck(d.cuStreamSynchronize(s))
assert (view == 9).all()
assert int(ck(d.cuMemHostGetDevicePointer(pinned, 0))) == pinned
ck(d.cuMemsetD32(pinned, 3, 1024)); ck(d.cuCtxSynchronize()); assert (view == 3).all()
own = np.zeros(4096, np.uint8)
flags = d.CU_MEMHOSTREGISTER_PORTABLE
ck(d.cuMemHostRegister(own.ctypes.data, own.nbytes, flags))
assert code(d.cuMemHostRegister(own.ctypes.data, 16, flags)).endswith("ALREADY_REGISTERED")
ck(d.cuMemHostUnregister(own.ctypes.data))
assert code(d.cuMemHostUnregister(own.ctypes.data)).endswith("NOT_REGISTERED")
m = int(ck(d.cuMemAllocManaged(4096, 1)))
ck(d.cuMemsetD8(m, 5, 4096)); ck(d.cuCtxSynchronize())
assert ctypes.string_at(m, 4096) == bytes([5]) * 4096
attribute = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
assert ck(d.cuPointerGetAttribute(attribute, m)) and not ck(d.cuPointerGetAttribute(attribute, p))
ck(d.cuMemFree(m)); ck(d.cuMemFreeHost(pinned))
""",
        tmp_path,
    )


def test_gpus_that_do_not_reach_each_other(tmp_path: Path) -> None:
    """Only the copy between two contexts does, as with a driver that goes by way of the host."""
    program.run(
        """
one, zero = use(1), use(0)
assert ck(d.cuDeviceCanAccessPeer(0, 1)) == ck(d.cuDeviceCanAccessPeer(1, 0)) == 0
assert code(d.cuCtxEnablePeerAccess(one, 0)) == "ERROR_PEER_ACCESS_UNSUPPORTED"
size = 2 << 20
here, there = (ck(d.cuMemCreate(size, properties(n), 0)) for n in (0, 1))
va = ck(d.cuMemAddressReserve(size, 0, 0, 0))
ck(d.cuMemMap(va, size, 0, there, 0))
assert code(d.cuMemSetAccess(va, size, [access(0)], 1)) == "ERROR_INVALID_DEVICE"
ck(d.cuMemSetAccess(va, size, [access(1)], 1))
mine = map_memory(here, size)
ck(d.cuMemsetD32(mine, 7, size // 4)); ck(d.cuCtxSynchronize())
ck(d.cuMemcpyPeer(va, one, mine, zero, size)); ck(d.cuCtxSynchronize())
ck(d.cuCtxSetCurrent(one))
assert fetch(va, 4).tolist() == [7] * 4
""",
        tmp_path,
        PHOS_SOFTGPU_DEVICES="2",
        PHOS_SOFTGPU_PEERS="0",
    )


def test_peer_access_is_asked_for(tmp_path: Path) -> None:
    program.run(
        """
one = use(1); p = ck(d.cuMemAlloc(4096)); zero = use(0)
q = ck(d.cuMemAlloc(4096))
ck(d.cuMemcpyPeer(q, zero, p, one, 4096))       # copies need none
ck(d.cuCtxEnablePeerAccess(one, 0))
assert code(d.cuCtxEnablePeerAccess(one, 0)) == "ERROR_PEER_ACCESS_ALREADY_ENABLED"
a = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ACCESS_FLAGS
assert int(ck(d.cuPointerGetAttribute(a, p))) == 3
ck(d.cuCtxDisablePeerAccess(one))
assert int(ck(d.cuPointerGetAttribute(a, p))) == 0
assert code(d.cuCtxDisablePeerAccess(one)) == "ERROR_PEER_ACCESS_NOT_ENABLED"
""",
        tmp_path,
        PHOS_SOFTGPU_DEVICES="2",
    )


def test_a_batch_of_copies(tmp_path: Path) -> None:
    """Attributes hold for runs of copies; a source read during the call may change after it."""
    program.run(
        """
use(); s = ck(d.cuStreamCreate(1)); n = 1024
p, q = ck(d.cuMemAlloc(4 * n)), ck(d.cuMemAlloc(4 * n))
first, second = np.full(n, 3, np.uint32), np.full(n, 4, np.uint32)
order = d.CUmemcpySrcAccessOrder
def kind(name):
    a = d.CUmemcpyAttributes()
    a.srcAccessOrder = getattr(order, "CU_MEMCPY_SRC_ACCESS_ORDER_" + name)
    return a
def batch(to, source, sizes, kinds, starts, stream=s):
    return d.cuMemcpyBatchAsync([d.CUdeviceptr(int(x)) for x in to],
                                [d.CUdeviceptr(int(x)) for x in source], sizes, len(to), kinds,
                                starts, len(kinds), stream)
both = [first.ctypes.data, second.ctypes.data]
ck(batch([p, q], both, [4 * n, 4 * n], [kind("STREAM"), kind("DURING_API_CALL")], [0, 1]))
first[:] = second[:] = 0
ck(d.cuStreamSynchronize(s)); assert (fetch(p, n) == 3).all() and (fetch(q, n) == 4).all()
def refused(*arguments): return code(batch(*arguments)) == "ERROR_INVALID_VALUE"
one = [kind("STREAM")]
assert refused([p, q], both, [4, 4], one, [1])              # the first copy has no attributes
assert refused([p, q], both, [4, 4], one * 2, [0, 2])
assert refused([p], [q], [4], [d.CUmemcpyAttributes()], [0])
assert refused([p], [q], [4], one, [0], 0)                  # not in the legacy stream
assert refused([p, 0x6f8000000000], [q, q], [4 * n, 4], one, [0])
ck(d.cuStreamSynchronize(s)); assert (fetch(p, n) == 3).all()   # nothing of a refused batch ran
""",
        tmp_path,
    )


@pytest.mark.parametrize("three", [False, True])
def test_a_copy_between_contexts_is_serialized_with_all_their_work(
    three: bool, tmp_path: Path
) -> None:
    """It follows what non-blocking streams of both contexts, and of the current one, were given
    before it, and comes before what any stream of theirs, old or new, is given after it."""
    program.run(
        """
def copy(to, to_context, source, context, size):
    if not THREE:
        return ck(d.cuMemcpyPeer(to, to_context, source, context, size))
    c = d.CUDA_MEMCPY3D_PEER(); device = d.CUmemorytype.CU_MEMORYTYPE_DEVICE
    c.srcMemoryType, c.srcDevice, c.srcContext = device, int(source), context
    c.dstMemoryType, c.dstDevice, c.dstContext = device, int(to), to_context
    c.WidthInBytes, c.Height, c.Depth = size, 1, 1
    return ck(d.cuMemcpy3DPeer(c))

n = 1024
def make(ordinal):
    context = use(ordinal)
    data, flag = ck(d.cuMemAlloc(4 * n)), ck(d.cuMemAlloc(4))
    ck(d.cuMemsetD32(data, 0, n)); ck(d.cuMemsetD32(flag, 0, 1)); ck(d.cuCtxSynchronize())
    return context, data, flag, ck(d.cuStreamCreate(1))
(one, source, gate_one, before_one), (two, target, gate_two, before_two) = make(0), make(1)
current, _, gate_current, before_current = make(2)
for context, gate, stream in ((one, gate_one, before_one), (two, gate_two, before_two),
                              (current, gate_current, before_current)):
    ck(d.cuCtxSetCurrent(context)); ck(d.cuStreamWaitValue32(stream, gate, 1, 0))
ck(d.cuCtxSetCurrent(one)); ck(d.cuMemsetD32Async(source, 7, n, before_one))
ck(d.cuCtxSetCurrent(current))
copy(target, two, source, one, 4 * n)               # returns at once: nothing of it is in the host
late = []
for context in (one, two, current):
    ck(d.cuCtxSetCurrent(context)); late.append(ck(d.cuStreamCreate(1)))
ck(d.cuCtxSetCurrent(one)); ck(d.cuMemsetD32Async(source, 9, n, late[0]))
ck(d.cuCtxSetCurrent(two)); total = ck(d.cuMemAlloc(4 * n))
ck(d.cuMemcpyDtoDAsync(total, target, 4 * n, late[1]))
ck(d.cuCtxSetCurrent(current)); end = ck(d.cuEventCreate(0)); ck(d.cuEventRecord(end, late[2]))
for opened, gate in ((0, gate_two), (1, gate_current), (2, gate_one)):  # the last one lets it go
    time.sleep(0.05)
    for context, stream in zip((one, two, current), late):
        ck(d.cuCtxSetCurrent(context)); assert code(d.cuStreamQuery(stream)) == "ERROR_NOT_READY"
    assert code(d.cuEventQuery(end)) == "ERROR_NOT_READY"
    ctypes.c_uint32.from_address(int(gate)).value = 1
for context in (one, two, current):
    ck(d.cuCtxSetCurrent(context)); ck(d.cuCtxSynchronize())
assert (fetch(target, n) == 7).all() and (fetch(total, n) == 7).all()
assert (fetch(source, n) == 9).all() and code(d.cuEventQuery(end)) == "SUCCESS"
""".replace("THREE", str(three)),
        tmp_path,
        PHOS_SOFTGPU_DEVICES="3",
    )


def test_a_linked_account_is_refused(tmp_path: Path) -> None:
    """A user must not make another's process write to a file of his choice."""
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "gpu0").symlink_to(target)
    assert program.run("print(code(d.cuInit(0)))", tmp_path) == "ERROR_OPERATING_SYSTEM\n"
    assert target.read_text() == "keep me"


def test_a_forked_child_has_no_gpu_and_no_memory_of_it(tmp_path: Path) -> None:
    program.run(
        """
use(); h = ck(d.cuMemCreate(2 << 20, properties(), 0)); va = int(map_memory(h, 2 << 20))
pid = os.fork()
if pid == 0:
    seen = "memfd:phos" in open("/proc/self/maps").read()
    os._exit(0 if code(d.cuMemAlloc(16)) == code(d.cuInit(0)) == "ERROR_NOT_INITIALIZED"
             and not seen else 1)
assert os.waitpid(pid, 0)[1] == 0
ck(d.cuMemAlloc(16))
""",
        tmp_path,
    )


MANAGED = """
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 plain = 5;
.visible .global .attribute(.managed) .align 8 .u64 counter = 7;
.visible .global .attribute(.managed) .align 4 .b8 text[6];
.visible .entry count(.param .u64 unused) {
    .reg .u64 %n;
    ld.global.u64 %n, [counter];
    add.u64 %n, %n, 1;
    st.global.u64 [counter], %n;
    ret;
}
"""


def test_managed_variables_are_reached_by_the_host(tmp_path: Path) -> None:
    program.run(
        f"""
use()
code_text = {MANAGED.encode() + bytes(1)!r}
module = ck(d.cuModuleLoadData(code_text))
count = ck(d.cuModuleGetFunction(module, b"count"))
attribute = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
at, size = ck(d.cuModuleGetGlobal(module, b"counter"))
assert size == 8 and ck(d.cuPointerGetAttribute(attribute, at))
assert ck(d.cuModuleGetGlobal(module, b"text"))[1] == 6
assert not ck(d.cuPointerGetAttribute(attribute, ck(d.cuModuleGetGlobal(module, b"plain"))[0]))
counter = ctypes.c_uint64.from_address(int(at))
assert counter.value == 7
counter.value = 40
for _ in range(2):
    ck(d.cuLaunchKernel(count, 1, 1, 1, 1, 1, 1, 0, 0, ((0,), (ctypes.c_uint64,)), 0))
ck(d.cuCtxSynchronize())
assert counter.value == 42
ck(d.cuModuleUnload(module))
assert code(d.cuPointerGetAttribute(attribute, at)) == "ERROR_INVALID_VALUE"
module = ck(d.cuModuleLoadData(code_text))
ck(d.cuDevicePrimaryCtxReset(0))
library = ck(d.cuLibraryLoadData(code_text, None, None, 0, None, None, 0))
use()
at = ck(d.cuLibraryGetGlobal(library, b"counter"))[0]
assert ctypes.c_uint64.from_address(int(at)).value == 7
other = ck(d.cuCtxCreate(None, 0, 0))
assert code(d.cuLibraryGetGlobal(library, b"counter")) == "ERROR_NOT_SUPPORTED"
ck(d.cuLibraryUnload(library))
""",
        tmp_path,
    )
