"""Copies, fills and operations on values, in every form; tensor maps as values."""

from pathlib import Path

from tests.native.softgpu import program

# Copies of three dimensions, all through one function: `made(kind)` describes a box of 8 bytes x
# 3 rows x 2 slices, at x = 4, y = 1, z = 1 of the source and at x = 8, y = 0, z = 1 of the target.
BOXES = """
DEVICE, HOST = d.CUmemorytype.CU_MEMORYTYPE_DEVICE, d.CUmemorytype.CU_MEMORYTYPE_HOST
UNIFIED = d.CUmemorytype.CU_MEMORYTYPE_UNIFIED
use(); s = ck(d.cuStreamCreate(1))
source = np.arange(3 * 5 * 32, dtype=np.uint8).reshape(3, 5, 32)    # slices, rows, bytes
p, q = ck(d.cuMemAlloc(source.nbytes)), ck(d.cuMemAlloc(3 * 4 * 64))
ck(d.cuMemcpyHtoD(p, source.ctypes.data, source.nbytes))
def box(made, from_type, to_type, out=None):
    c = made
    c.srcMemoryType, c.dstMemoryType = from_type, to_type
    if from_type is HOST: c.srcHost = source.ctypes.data
    else: c.srcDevice = int(p)
    if to_type is HOST: c.dstHost = out.ctypes.data
    else: c.dstDevice = int(q)
    c.srcXInBytes, c.srcY, c.srcPitch = 4, 1, 32
    c.dstXInBytes, c.dstPitch = 8, 64
    c.WidthInBytes, c.Height = 8, 3
    return c
def deep(made, *arguments):
    c = box(made, *arguments)
    c.srcZ, c.srcHeight, c.dstZ, c.dstHeight, c.Depth = 1, 5, 1, 4, 2
    return c
def target(slices):
    out = np.zeros((3, 4, 64), np.uint8)
    if slices == 1: out[0, 0:3, 8:16] = source[0, 1:4, 4:12]
    else: out[1:3, 0:3, 8:16] = source[1:3, 1:4, 4:12]
    return out
def clear():
    ck(d.cuMemsetD8(q, 0, 3 * 4 * 64)); ck(d.cuCtxSynchronize())
def read():
    out = np.zeros((3, 4, 64), np.uint8)
    ck(d.cuCtxSynchronize()); ck(d.cuMemcpyDtoH(out.ctypes.data, q, out.nbytes))
    return out
"""


def test_copies_of_two_dimensions(tmp_path: Path) -> None:
    program.run(
        BOXES
        + """
made = d.CUDA_MEMCPY2D
for call in (d.cuMemcpy2D, d.cuMemcpy2DUnaligned, lambda c: d.cuMemcpy2DAsync(c, s)):
    for kind in (DEVICE, HOST, UNIFIED):
        clear(); ck(call(box(made(), kind, DEVICE))); assert (read() == target(1)).all()
    out = np.zeros((3, 4, 64), np.uint8)
    ck(call(box(made(), DEVICE, HOST, out))); ck(d.cuStreamSynchronize(s))
    assert (out == target(1)).all()
bad = box(made(), DEVICE, DEVICE); bad.srcPitch = 7      # shorter than a row
assert code(d.cuMemcpy2D(bad)) == "ERROR_INVALID_VALUE"
""",
        tmp_path,
    )


def test_copies_of_three_dimensions(tmp_path: Path) -> None:
    program.run(
        BOXES
        + """
one = ck(d.cuCtxGetCurrent())
def peer():
    c = d.CUDA_MEMCPY3D_PEER(); c.srcContext = c.dstContext = one
    return c
for made, call in ((d.CUDA_MEMCPY3D, d.cuMemcpy3D), (peer, d.cuMemcpy3DPeer),
                   (d.CUDA_MEMCPY3D, lambda c: d.cuMemcpy3DAsync(c, s)),
                   (peer, lambda c: d.cuMemcpy3DPeerAsync(c, s))):
    for kind in (DEVICE, HOST):
        clear(); ck(call(deep(made(), kind, DEVICE))); assert (read() == target(2)).all()
    out = np.zeros((3, 4, 64), np.uint8)
    ck(call(deep(made(), DEVICE, HOST, out))); ck(d.cuStreamSynchronize(s))
    assert (out == target(2)).all()
clear(); ck(d.cuMemcpyPeer(int(q) + 64, one, p, one, 32)); ck(d.cuCtxSynchronize())
ck(d.cuMemcpyPeerAsync(int(q) + 128, one, int(p) + 32, one, 32, s))
assert (read()[0, 1:3, :32] == source[0, 0:2]).all()
""",
        tmp_path,
    )


def test_a_batch_of_copies_of_three_dimensions(tmp_path: Path) -> None:
    program.run(
        BOXES
        + """
clear()
def operand(address, row, layer):
    o = d.CUmemcpy3DOperand(); o.type = d.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
    at = o.op.ptr; at.ptr = address; at.rowLength = row; at.layerHeight = layer
    return o
def operation(source, to, width=8):
    b = d.CUDA_MEMCPY3D_BATCH_OP(); b.src, b.dst = source, to
    b.extent.width, b.extent.height, b.extent.depth = width, 3, 2
    b.srcAccessOrder = d.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return b
start = 32 * (1 * 5 + 1) + 4, 64 * (1 * 4 + 0) + 8
good = operation(operand(int(p) + start[0], 32, 5), operand(int(q) + start[1], 64, 4))
# Lengths of zero mean that the box is packed: 8 bytes a row, 3 rows a slice.
pack = operation(operand(int(p) + start[0], 32, 5), operand(int(q), 0, 0))
ck(d.cuMemcpy3DBatchAsync(2, [good, pack], 0, s))
want = target(2)
want.reshape(-1)[:48] = source[1:3, 1:4, 4:12].reshape(-1)
assert (read() == want).all()
narrow = operation(operand(int(p), 7, 0), operand(int(q), 0, 0))
clear()
assert code(d.cuMemcpy3DBatchAsync(2, [good, narrow], 0, s)) == "ERROR_INVALID_VALUE"
assert code(d.cuMemcpy3DBatchAsync(1, [good], 0, 0)) == "ERROR_INVALID_VALUE"
assert (read() == 0).all()                               # nothing of a refused batch ran
""",
        tmp_path,
    )


def test_who_waits_for_a_fill(tmp_path: Path) -> None:
    """Only who fills the host's own memory by a synchronous call, as CUDA says."""
    program.run(
        """
use(); s = ck(d.cuStreamCreate(0))
flag = int(ck(d.cuMemAllocHost(4096)))
pinned, device = flag + 1024, ck(d.cuMemAlloc(4096))
word = lambda at: ctypes.c_uint32.from_address(at)
def hold():    # all of the default stream, until the flag is set
    word(flag).value = 0
    ck(d.cuStreamWaitValue32(s, flag, 1, 0))
for bits in (8, 16, 32):
    fill, rows = getattr(d, f"cuMemsetD{bits}"), getattr(d, f"cuMemsetD2D{bits}")
    late = getattr(d, f"cuMemsetD{bits}Async")
    hold(); word(pinned).value = word(pinned + 32).value = 0
    ck(fill(device, 1, 4)); ck(rows(device, 32, 1, 4, 2)); ck(late(pinned, 1, 4, 0))
    assert word(pinned).value == 0
    release = threading.Timer(0.1, lambda: setattr(word(flag), "value", 1)); release.start()
    ck(fill(pinned, 2, 4)); assert word(pinned).value % (1 << bits) == 2
    release.join(); hold()
    release = threading.Timer(0.1, lambda: setattr(word(flag), "value", 1)); release.start()
    ck(rows(pinned, 32, 3, 4, 2)); assert word(pinned + 32).value % (1 << bits) == 3
    release.join()
captured = ck(d.cuStreamCreate(1))
ck(d.cuStreamBeginCapture(captured, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
assert code(d.cuMemsetD32(pinned, 4, 1)) == "ERROR_STREAM_CAPTURE_UNSUPPORTED"
""",
        tmp_path,
    )


def test_fills_of_rows(tmp_path: Path) -> None:
    program.run(
        """
use(); s = ck(d.cuStreamCreate(1)); p = ck(d.cuMemAlloc(4096))
numbers = (8, np.uint8, 0xab), (16, np.uint16, 0xabcd), (32, np.uint32, 0xabcdef01)
for bits, kind, value in numbers:
    plain, late = getattr(d, f"cuMemsetD2D{bits}"), getattr(d, f"cuMemsetD2D{bits}Async")
    for call in (plain, lambda *arguments: late(*arguments, s)):
        ck(d.cuMemsetD8(p, 0, 4096)); ck(d.cuCtxSynchronize())
        ck(call(int(p) + 64, 256, value, 5, 3)); ck(d.cuStreamSynchronize(s))
        out = np.zeros((16, 256), np.uint8); ck(d.cuMemcpyDtoH(out.ctypes.data, p, 4096))
        want = np.zeros_like(out)
        want[:3, 64:64 + 5 * bits // 8] = np.full(5, value, kind).view(np.uint8)
        assert (out == want).all(), bits
    if bits > 8:
        assert code(plain(int(p) + 1, 256, value, 5, 3)) == "ERROR_INVALID_VALUE"
""",
        tmp_path,
    )


OPERATIONS = """
EQ = 1; kinds = d.CUstreamBatchMemOpType
def operation(kind, address, value):
    o = d.CUstreamBatchMemOpParams(); wide = kind.endswith("64")
    o.operation = getattr(kinds, "CU_STREAM_MEM_OP_" + kind)
    field = o.waitValue if kind.startswith("WAIT") else o.writeValue
    field.address = d.CUdeviceptr(address); field.flags = EQ if kind.startswith("WAIT") else 0
    if wide: field.value64 = d.cuuint64_t(value)
    else: field.value = d.cuuint32_t(value)
    return o
use(); s, t = ck(d.cuStreamCreate(1)), ck(d.cuStreamCreate(1)); p = ck(d.cuMemAlloc(64))
ck(d.cuMemsetD8(p, 0, 64)); ck(d.cuCtxSynchronize())
at = lambda i: int(p) + 8 * i
"""


def test_a_stream_writes_and_waits_for_values(tmp_path: Path) -> None:
    """Single and in batches, of both widths, by each condition."""
    program.run(
        OPERATIONS
        + """
GEQ, EQ, AND, NOR = range(4)
def waits(wait, address, value, condition, released_by, write):
    ck(wait(s, address, value, condition))
    time.sleep(0.02); assert code(d.cuStreamQuery(s)) == "ERROR_NOT_READY"
    ck(write(t, address, released_by, 0)); ck(d.cuStreamSynchronize(s))
w32, w64 = d.cuStreamWriteValue32, d.cuStreamWriteValue64
waits(d.cuStreamWaitValue32, at(0), 5, EQ, 5, w32)
waits(d.cuStreamWaitValue32, at(0), 6, GEQ, 7, w32)
waits(d.cuStreamWaitValue32, at(0), 8, AND, 12, w32)
waits(d.cuStreamWaitValue64, at(1), 1 << 40, GEQ, 1 << 40, w64)
waits(d.cuStreamWaitValue64, at(1), 1 << 41, AND, 3 << 41, w64)
ck(w64(t, at(1), 2**64 - 1, 0)); ck(d.cuStreamSynchronize(t))
waits(d.cuStreamWaitValue64, at(1), 1, NOR, 2, w64)
assert code(w64(t, at(1) + 4, 1, 0)) == "ERROR_INVALID_VALUE"

batch = [operation("WAIT_VALUE_32", at(2), 1), operation("WRITE_VALUE_64", at(3), 1 << 50),
         operation("WRITE_VALUE_32", at(4), 9)]
ck(d.cuStreamBatchMemOp(s, 3, batch, 0)); time.sleep(0.02)
assert code(d.cuStreamQuery(s)) == "ERROR_NOT_READY"
ck(d.cuStreamBatchMemOp(t, 1, [operation("WRITE_VALUE_32", at(2), 1)], 0))
ck(d.cuStreamSynchronize(s))
assert list(fetch(at(3), 3)) == [0, 1 << 18, 9]
""",
        tmp_path,
    )


def test_operations_on_values_are_nodes_of_graphs(tmp_path: Path) -> None:
    """Captured, a batch is one node; and it can be made, asked for and changed by hand."""
    program.run(
        OPERATIONS
        + """
ck(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
batch = [operation("WRITE_VALUE_32", at(0), 3), operation("WRITE_VALUE_64", at(1), 1 << 40)]
ck(d.cuStreamBatchMemOp(s, 2, batch, 0)); ck(d.cuStreamWriteValue32(s, at(2), 5, 0))
graph = ck(d.cuStreamEndCapture(s)); nodes, count = ck(d.cuGraphGetNodes(graph, 8))
assert count == 2
def asked(node):     # the bindings do not give the list back
    what = (ctypes.c_uint64 * 4)()
    get = ctypes.CDLL("libcuda.so.1").cuGraphBatchMemOpNodeGetParams
    assert get(ctypes.c_void_p(int(node)), what) == 0
    words = (ctypes.c_uint64 * (6 * what[1])).from_address(what[2])
    return [tuple(words[i:i + 3]) for i in range(0, len(words), 6)]
first, second = sorted((asked(node) for node in nodes[:2]), key=len, reverse=True)
assert first == [(2, at(0), 3), (5, at(1), 1 << 40)] and second == [(2, at(2), 5)]
what = d.CUDA_BATCH_MEM_OP_NODE_PARAMS(); what.ctx = ck(d.cuCtxGetCurrent())
what.count, what.paramArray = 1, [operation("WRITE_VALUE_32", at(3), 7)]
made = ck(d.cuGraphAddBatchMemOpNode(graph, None, 0, what))
executable = ck(d.cuGraphInstantiate(graph, 0))
ck(d.cuGraphLaunch(executable, s)); ck(d.cuStreamSynchronize(s))
assert list(fetch(at(0), 8)) == [3, 0, 0, 1 << 8, 5, 0, 7, 0]
what.paramArray = [operation("WRITE_VALUE_32", at(3), 8)]
ck(d.cuGraphExecBatchMemOpNodeSetParams(executable, made, what))
ck(d.cuGraphLaunch(executable, s)); ck(d.cuStreamSynchronize(s)); assert fetch(at(3), 1)[0] == 8
assert asked(made) == [(2, at(3), 7)]                    # the graph itself is as it was
what.paramArray = [operation("WRITE_VALUE_64", at(3) + 4, 8)]
assert code(d.cuGraphBatchMemOpNodeSetParams(made, what)) == "ERROR_INVALID_VALUE"
""",
        tmp_path,
    )


def test_a_tensor_map_is_a_value_that_begins_with_its_address(tmp_path: Path) -> None:
    program.run(
        """
use(); p = int(ck(d.cuMemAlloc(1 << 20)))
lib = ctypes.CDLL("libcuda.so.1")
FLOAT, INVALID = d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32.value, 1
room = np.zeros(16, np.uint64)
n64 = lambda *values: (ctypes.c_uint64 * len(values))(*values)
n32 = lambda *values: (ctypes.c_int32 * len(values))(*values)
def tiled(address=p, dims=(64, 32), stride=256, box=(16, 8)):
    return lib.cuTensorMapEncodeTiled(
        ctypes.c_void_p(room.ctypes.data), FLOAT, 2, ctypes.c_void_p(address), n64(*dims),
        n64(stride), n32(*box), n32(1, 1), 0, 0, 0, 0)
def columns(lower=-1, channels=16):
    return lib.cuTensorMapEncodeIm2col(
        ctypes.c_void_p(room.ctypes.data), FLOAT, 4, ctypes.c_void_p(p), n64(16, 8, 8, 2),
        n64(64, 512, 4096), n32(lower, -1), n32(1, 1), channels, 32, n32(1, 1, 1, 1), 0, 0, 0, 0)
def words(result):
    assert result == 0, result
    return room.tolist()
first = words(tiled()); assert first[0] == p
room[:] = 2**64 - 1; assert words(tiled()) == first      # a value: nothing else is in it
other = words(tiled(box=(16, 4))); assert other[0] == p and other != first
for wrong in (dict(address=p + 8), dict(dims=(0, 32)), dict(stride=40), dict(box=(257, 8)),
              dict(box=(3, 8)), dict(box=(16, 0))):
    assert tiled(**wrong) == INVALID, wrong
assert words(columns())[0] == p and words(columns(lower=-2)) != words(columns())
assert columns(lower=-129) == columns(channels=257) == INVALID
words(tiled())
replace = lambda address: lib.cuTensorMapReplaceAddress(
    ctypes.c_void_p(room.ctypes.data), ctypes.c_void_p(address))
assert words(replace(p + 4096)) == [p + 4096, *first[1:]]
assert replace(p + 8) == INVALID
""",
        tmp_path,
    )
