"""Pools in host and managed memory, and memory that graphs allocate. What refusals and attributes
are expected was seen on an H200 with a driver for CUDA 13.0."""

from pathlib import Path

from tests.native.softgpu import program

POOLS = """
PINNED = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
MANAGED = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
use(); s = ck(d.cuStreamCreate(1))
def location(name, id=0):
    made = d.CUmemLocation(); made.id = id
    made.type = getattr(d.CUmemLocationType, "CU_MEM_LOCATION_TYPE_" + name)
    return made
def create(kind, name, id=0):
    p = d.CUmemPoolProps(); p.allocType, p.location = kind, location(name, id)
    return d.cuMemPoolCreate(p)
def allow(pool, name, flags="READWRITE"):
    a = d.CUmemAccessDesc(); a.location = location(name)
    a.flags = getattr(d.CUmemAccess_flags, "CU_MEM_ACCESS_FLAGS_PROT_" + flags)
    return code(d.cuMemPoolSetAccess(pool, [a], 1))
def allowed(pool, name):
    return int(ck(d.cuMemPoolGetAccess(pool, location(name)))) == 3
def attribute(name, address):
    asked = getattr(d.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_" + name)
    result = d.cuPointerGetAttribute(asked, address)
    return int(result[1]) if code(result) == "SUCCESS" else code(result)
HOST_MEMORY, DEVICE_MEMORY = 1, 2
"""


def test_each_kind_of_memory_has_a_default_pool(tmp_path: Path) -> None:
    program.run(
        POOLS
        + """
pools = {}
for kind in (PINNED, MANAGED):
    for name in ("DEVICE", "HOST", "HOST_NUMA") + (("NONE",) if kind == MANAGED else ()):
        pool = pools[kind, name] = ck(d.cuMemGetDefaultMemPool(location(name), kind))
        assert int(pool) == int(ck(d.cuMemGetMemPool(location(name), kind)))
        assert code(d.cuMemPoolDestroy(pool)) == "ERROR_INVALID_VALUE"
assert len({int(pool) for pool in pools.values()}) == len(pools)
assert int(pools[PINNED, "DEVICE"]) == int(ck(d.cuDeviceGetDefaultMemPool(0)))
own = ck(create(PINNED, "HOST"))
ck(d.cuMemSetMemPool(location("HOST"), PINNED, own))
assert int(ck(d.cuMemGetMemPool(location("HOST"), PINNED))) == int(own)
for wrong in (location("HOST"), MANAGED), (location("HOST_NUMA"), PINNED):
    assert code(d.cuMemSetMemPool(*wrong, own)) == "ERROR_INVALID_VALUE"
ck(d.cuMemPoolDestroy(own))
assert int(ck(d.cuMemGetMemPool(location("HOST"), PINNED))) == int(pools[PINNED, "HOST"])
for kind, name, id in ((PINNED, "NONE", 0), (PINNED, "HOST_NUMA", -1), (MANAGED, "HOST_NUMA", 99),
                       (PINNED, "HOST_NUMA_CURRENT", 0)):
    assert code(create(kind, name, id)) == "ERROR_INVALID_VALUE", (kind, name, id)
""",
        tmp_path,
    )


def test_a_host_pool_is_the_hosts_until_a_device_is_let_in(tmp_path: Path) -> None:
    program.run(
        POOLS
        + """
free = ck(d.cuMemGetInfo())[0]
pool = ck(create(PINNED, "HOST")); p = int(ck(d.cuMemAllocFromPoolAsync(4096, pool, s)))
ck(d.cuStreamSynchronize(s)); host = (ctypes.c_ubyte * 4096).from_address(p); host[:] = [3] * 4096
assert ck(d.cuMemGetInfo())[0] == free                  # it takes nothing of the device's
assert attribute("MEMORY_TYPE", p) == HOST_MEMORY and attribute("HOST_POINTER", p) == p
assert attribute("DEVICE_POINTER", p) == "ERROR_INVALID_VALUE" and not attribute("IS_MANAGED", p)
assert allowed(pool, "HOST") and not allowed(pool, "DEVICE")
q = int(ck(d.cuMemAlloc(4096)))
assert code(d.cuMemsetD8Async(p, 1, 16, s)) == "ERROR_INVALID_VALUE"
assert code(d.cuMemcpyDtoDAsync(q, p, 16, s)) == "ERROR_INVALID_VALUE"
ck(d.cuMemcpyAsync(q, p, 16, s)); ck(d.cuStreamSynchronize(s))               # from host memory
assert (fetch(q, 4) == 0x03030303).all()
assert allow(pool, "HOST", "NONE") == allow(pool, "DEVICE", "READ") == "ERROR_NOT_SUPPORTED"
assert allow(pool, "HOST") == allow(pool, "DEVICE") == "SUCCESS" and allowed(pool, "DEVICE")
assert attribute("DEVICE_POINTER", p) == p
ck(d.cuMemsetD8Async(p, 9, 4096, s)); ck(d.cuStreamSynchronize(s)); assert host[4095] == 9
more = int(ck(d.cuMemAllocFromPoolAsync(8 << 20, pool, s)))                  # a new segment too
ck(d.cuMemsetD8Async(more, 1, 8 << 20, s)); ck(d.cuStreamSynchronize(s))
assert allow(pool, "DEVICE", "NONE") == "SUCCESS"
assert code(d.cuMemsetD8Async(p, 1, 16, s)) == "ERROR_INVALID_VALUE"
for address in (p, more): ck(d.cuMemFreeAsync(address, s))
ck(d.cuMemPoolDestroy(pool)); ck(d.cuStreamSynchronize(s))
assert attribute("MEMORY_TYPE", p) == "ERROR_INVALID_VALUE"
""",
        tmp_path,
    )


def test_a_synchronous_copy_into_a_host_pool_is_complete(tmp_path: Path) -> None:
    program.run(
        POOLS
        + """
pool = ck(create(PINNED, "HOST")); assert allow(pool, "DEVICE") == "SUCCESS"
p = int(ck(d.cuMemAllocFromPoolAsync(1 << 20, pool, s))); ck(d.cuStreamSynchronize(s))
q = ck(d.cuMemAlloc(1 << 20)); ck(d.cuMemsetD8(q, 5, 1 << 20))
ck(d.cuMemcpyDtoH(p, q, 1 << 20)); assert ctypes.string_at(p, 1 << 20) == b"\\5" * (1 << 20)
""",
        tmp_path,
        PHOS_SOFTGPU_COPY_RATE="20M",
    )


def test_a_managed_pool_is_everybodys(tmp_path: Path) -> None:
    program.run(
        POOLS
        + """
pool = ck(create(MANAGED, "DEVICE")); p = int(ck(d.cuMemAllocFromPoolAsync(4096, pool, s)))
ck(d.cuMemsetD8Async(p, 7, 4096, s)); ck(d.cuStreamSynchronize(s))
assert ctypes.string_at(p, 4096) == b"\\7" * 4096
assert attribute("MEMORY_TYPE", p) == DEVICE_MEMORY and attribute("IS_MANAGED", p) == 1
assert attribute("HOST_POINTER", p) == attribute("DEVICE_POINTER", p) == p
assert not allowed(pool, "DEVICE") and allow(pool, "HOST") == "SUCCESS" and allowed(pool, "HOST")
ck(d.cuCtxSetCurrent(ck(d.cuDevicePrimaryCtxRetain(1))))
ck(d.cuMemsetD8(p, 8, 16)); ck(d.cuCtxSynchronize()); assert ctypes.string_at(p, 16) == b"\\10" * 16
""",
        tmp_path,
        PHOS_SOFTGPU_DEVICES="2",
    )


def test_a_checkpoint_saves_host_pools_and_refuses_managed_ones(tmp_path: Path) -> None:
    program.run(
        POOLS
        + """
def checkpoint():
    me = os.getpid(); a = d.CUcheckpointLockArgs(); a.timeoutMs = 5000
    ck(d.cuCheckpointProcessLock(me, a)); result = code(d.cuCheckpointProcessCheckpoint(me, None))
    if result == "SUCCESS": ck(d.cuCheckpointProcessRestore(me, None))
    ck(d.cuCheckpointProcessUnlock(me, None))
    return result
host, managed = (ck(d.cuMemGetDefaultMemPool(location("HOST"), kind)) for kind in (PINNED, MANAGED))
p = int(ck(d.cuMemAllocFromPoolAsync(4096, host, s))); ck(d.cuStreamSynchronize(s))
data = (ctypes.c_ubyte * 4096).from_address(p); data[:] = [3] * 4096
assert checkpoint() == "SUCCESS" and set(data) == {3}
data[0] = 4; assert allow(host, "DEVICE") == "SUCCESS"; assert fetch(p, 1)[0] == 0x03030304
q = ck(d.cuMemAllocFromPoolAsync(4096, managed, s)); ck(d.cuStreamSynchronize(s))
assert checkpoint() == "ERROR_NOT_SUPPORTED"
ck(d.cuMemFreeAsync(q, s)); ck(d.cuStreamSynchronize(s)); assert checkpoint() == "SUCCESS"
""",
        tmp_path,
    )


GRAPHS = """
use(); s = ck(d.cuStreamCreate(1)); n = 1 << 18
GLOBAL = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
def capture(body):
    ck(d.cuStreamBeginCapture(s, GLOBAL)); result = body()
    return ck(d.cuStreamEndCapture(s)), result
def instantiate(graph, flags=0): return ck(d.cuGraphInstantiate(graph, flags))
def launch(executable):
    result = code(d.cuGraphLaunch(executable, s)); ck(d.cuStreamSynchronize(s))
    return result
def nodes_of(graph):
    nodes, count = ck(d.cuGraphGetNodes(graph, 8))
    return nodes[:count]
def kinds(graph): return [int(ck(d.cuGraphNodeGetType(node))) for node in nodes_of(graph)]
reserved = d.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
def held(): return int(ck(d.cuDeviceGetGraphMemAttribute(0, reserved)))
"""


def test_a_graph_allocates_and_frees(tmp_path: Path) -> None:
    program.run(
        GRAPHS
        + """
out = ck(d.cuMemAlloc(4 * n)); plain = ck(d.cuMemAllocAsync(64, s))
def scratch():
    p = int(ck(d.cuMemAllocAsync(4 * n, s)))
    ck(d.cuMemsetD32Async(p, 5, n, s)); ck(d.cuMemcpyDtoDAsync(out, p, 4 * n, s))
    assert code(d.cuMemFreeAsync(plain, s)) == "ERROR_INVALID_VALUE"    # not a graph's
    ck(d.cuMemFreeAsync(p, s))
    assert code(d.cuMemFreeAsync(p, s)) == "ERROR_INVALID_VALUE"
    return p
graph, p = capture(scratch); assert kinds(graph) == [10, 2, 1, 11]
for refused in (d.cuGraphClone(graph), d.cuGraphDestroyNode(nodes_of(graph)[1]),
                d.cuGraphAddChildGraphNode(ck(d.cuGraphCreate(0)), None, 0, graph)):
    assert code(refused) == "ERROR_NOT_SUPPORTED"
executable = instantiate(graph)
assert code(d.cuGraphInstantiate(graph, 0)) == "ERROR_NOT_SUPPORTED"    # one at a time
for _ in range(2):
    ck(d.cuMemsetD32(out, 0, n)); ck(d.cuCtxSynchronize())
    assert launch(executable) == "SUCCESS" and (fetch(out, n) == 5).all()
assert code(d.cuMemFree(p)) == code(d.cuMemFreeAsync(p, s)) == "ERROR_INVALID_VALUE"
ck(d.cuGraphExecDestroy(executable)); executable = instantiate(graph)
assert launch(executable) == "SUCCESS" and held() >= 4 * n
ck(d.cuGraphExecDestroy(executable)); ck(d.cuGraphDestroy(graph)); ck(d.cuDeviceGraphMemTrim(0))
assert held() == 0
""",
        tmp_path,
    )


def test_what_a_graph_leaves_allocated_is_the_programs(tmp_path: Path) -> None:
    program.run(
        GRAPHS
        + """
def leave():
    p = int(ck(d.cuMemAllocAsync(4 * n, s))); ck(d.cuMemsetD32Async(p, 6, n, s))
    return p
graph, p = capture(leave); executable = instantiate(graph)
assert code(d.cuMemFreeAsync(p, s)) == "ERROR_INVALID_VALUE"            # no launch gave it yet
assert launch(executable) == "SUCCESS" and launch(executable) == "ERROR_INVALID_VALUE"
assert (fetch(p, n) == 6).all(); ck(d.cuMemFreeAsync(p, s))
assert code(d.cuMemFreeAsync(p, s)) == "ERROR_INVALID_VALUE"
assert launch(executable) == "SUCCESS"; ck(d.cuMemFree(p))
assert launch(executable) == "SUCCESS"
ck(d.cuGraphExecDestroy(executable)); ck(d.cuGraphDestroy(graph))
assert (fetch(p, n) == 6).all() and held() > 0; ck(d.cuMemFree(p)); assert held() == 0

AUTO = d.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
graph, p = capture(leave); executable = instantiate(graph, AUTO.value)
assert [launch(executable) for _ in range(3)] == ["SUCCESS"] * 3
other = ck(d.cuGraphCreate(0)); ck(d.cuGraphAddMemFreeNode(other, None, 0, p))
free = instantiate(other)
assert launch(free) == "SUCCESS" and launch(free) == "ERROR_INVALID_VALUE"
assert launch(executable) == launch(free) == "SUCCESS"
""",
        tmp_path,
    )


def test_allocation_nodes_are_made_by_hand_too(tmp_path: Path) -> None:
    program.run(
        GRAPHS
        + """
graph = ck(d.cuGraphCreate(0)); what = d.CUDA_MEM_ALLOC_NODE_PARAMS()
what.poolProps.allocType = properties().type; what.poolProps.location = properties().location
what.bytesize = 4 * n
node = ck(d.cuGraphAddMemAllocNode(graph, None, 0, what)); p = int(what.dptr)
assert int(ck(d.cuGraphMemAllocNodeGetParams(node)).dptr) == p
fill = d.CUDA_MEMSET_NODE_PARAMS(); fill.dst, fill.value, fill.elementSize = p, 3, 4
fill.width, fill.height = n, 1
second = ck(d.cuGraphAddMemsetNode(graph, [node], 1, fill, ck(d.cuCtxGetCurrent())))
executable = instantiate(graph)
assert launch(executable) == "SUCCESS" and (fetch(p, n) == 3).all(); ck(d.cuMemFree(p))
ck(d.cuGraphExecDestroy(executable))
last = ck(d.cuGraphAddMemFreeNode(graph, [second], 1, p))
assert int(ck(d.cuGraphMemFreeNodeGetParams(last))) == p and kinds(graph) == [10, 2, 11]
executable = instantiate(graph); assert [launch(executable) for _ in range(2)] == ["SUCCESS"] * 2
""",
        tmp_path,
    )
