"""Streams, events, captures and graphs."""

from pathlib import Path

from tests.native.softgpu import program


def test_streams_are_asynchronous_and_concurrent(tmp_path: Path) -> None:
    program.run(
        """
use()
a, b = ck(d.cuStreamCreate(1)), ck(d.cuStreamCreate(1))
flag = ck(d.cuMemAlloc(8)); ck(d.cuMemsetD32(flag, 0, 2)); ck(d.cuCtxSynchronize())
ck(d.cuStreamWaitValue32(a, flag, 1, 0))            # a waits for b, so both must run
assert code(d.cuStreamQuery(a)) == "ERROR_NOT_READY"
ck(d.cuStreamWriteValue32(b, flag, 1, 0))
ck(d.cuStreamSynchronize(a))
assert code(d.cuStreamQuery(a)) == "SUCCESS"
""",
        tmp_path,
    )


def test_the_legacy_stream_orders_blocking_streams(tmp_path: Path) -> None:
    program.run(
        """
use()
blocking, free = ck(d.cuStreamCreate(0)), ck(d.cuStreamCreate(1))
flag = ck(d.cuMemAlloc(8)); ck(d.cuMemsetD32(flag, 0, 2)); ck(d.cuCtxSynchronize())
ck(d.cuStreamWaitValue32(blocking, flag, 1, 0))
ck(d.cuMemsetD32Async(int(flag) + 4, 1, 1, 0))      # legacy: behind the blocking stream
ck(d.cuMemsetD32Async(int(flag) + 4, 2, 1, free)); ck(d.cuStreamSynchronize(free))
time.sleep(0.05)
out = np.zeros(1, np.uint32)
ck(d.cuMemcpyDtoHAsync(out.ctypes.data, int(flag) + 4, 4, free)); assert out[0] == 2
assert code(d.cuStreamQuery(0)) == "ERROR_NOT_READY"
ck(d.cuStreamWriteValue32(free, flag, 1, 0)); ck(d.cuStreamSynchronize(0))
assert fetch(int(flag) + 4, 1)[0] == 1
""",
        tmp_path,
    )


def test_work_of_a_destroyed_stream_is_the_context_s(tmp_path: Path) -> None:
    """As on an H200 (driver 580.159): all that waits for the context waits for it."""
    program.run(
        """
context = use()
host = ck(d.cuCtxGetCurrent())
flag = ck(d.cuMemAlloc(8)); ck(d.cuMemsetD32(flag, 0, 2)); ck(d.cuCtxSynchronize())
other, event = ck(d.cuStreamCreate(1)), ck(d.cuEventCreate(2))
for number, kind in enumerate((1, 0), 1):
    stream = ck(d.cuStreamCreate(kind))
    ck(d.cuStreamWaitValue32(stream, flag, number, 0))
    ck(d.cuMemsetD32Async(int(flag) + 4, number, 1, stream))
    ck(d.cuStreamDestroy(stream))
    ck(d.cuCtxRecordEvent(host, event))
    assert code(d.cuEventQuery(event)) == "ERROR_NOT_READY"
    assert code(d.cuStreamQuery(0)) == ("SUCCESS" if kind == 1 else "ERROR_NOT_READY")
    ck(d.cuStreamWriteValue32(other, flag, number, 0)); ck(d.cuCtxSynchronize())
    assert code(d.cuEventQuery(event)) == "SUCCESS"
    assert fetch(int(flag) + 4, 1)[0] == number
""",
        tmp_path,
    )


def test_events_mark_order_and_time(tmp_path: Path) -> None:
    program.run(
        """
use()
a, b = ck(d.cuStreamCreate(1)), ck(d.cuStreamCreate(1))
start, end = ck(d.cuEventCreate(0)), ck(d.cuEventCreate(0))
p = ck(d.cuMemAlloc(4)); ck(d.cuMemsetD32(p, 0, 1)); ck(d.cuCtxSynchronize())
flag = ck(d.cuMemAlloc(4)); ck(d.cuMemsetD32(flag, 0, 1)); ck(d.cuCtxSynchronize())
ck(d.cuEventRecord(start, a)); ck(d.cuStreamWaitValue32(a, flag, 1, 0))
ck(d.cuMemsetD32Async(p, 5, 1, a)); ck(d.cuMemsetD32Async(p, 6, 1, a))
ck(d.cuEventRecord(end, a))
assert code(d.cuEventQuery(end)) == "ERROR_NOT_READY"
assert code(d.cuEventElapsedTime(start, end)) == "ERROR_NOT_READY"
ck(d.cuStreamWriteValue32(b, flag, 1, 0))
ck(d.cuStreamWaitEvent(b, end, 0)); ck(d.cuMemsetD32Async(p, 7, 1, b)); ck(d.cuStreamSynchronize(b))
assert fetch(p, 1)[0] == 7
assert 90 < ck(d.cuEventElapsedTime(start, end)) < 60000
silent = ck(d.cuEventCreate(d.CUevent_flags.CU_EVENT_DISABLE_TIMING))
ck(d.cuEventRecord(silent, a))
ck(d.cuEventSynchronize(silent))
assert code(d.cuEventElapsedTime(start, silent)) == "ERROR_INVALID_HANDLE"
""",
        tmp_path,
        PHOS_SOFTGPU_LATENCY="0.05",
    )


def test_the_copy_rate_is_that_of_the_process(tmp_path: Path) -> None:
    """Its streams share it, whatever kind of copy they do; those of other processes do not."""
    code = """
use(); p = ck(d.cuMemAlloc(8 << 20)); host = ck(d.cuMemAllocHost(1 << 20))
shared = ck(d.cuMemExportToShareableHandle(ck(d.cuMemCreate(2 << 20, properties(), 0)), FD, 0))
va = int(map_memory(ck(d.cuMemImportFromShareableHandle(int(shared), FD)), 2 << 20))
a, b = ck(d.cuStreamCreate(1)), ck(d.cuStreamCreate(1)); ck(d.cuCtxSynchronize())
start = time.monotonic()
ck(d.cuMemcpyDtoDAsync(p, va, 1 << 20, a)); ck(d.cuMemcpyDtoHAsync(host, va, 1 << 20, b))
ck(d.cuCtxSynchronize())
print(time.monotonic() - start)
"""
    assert float(program.run(code, tmp_path, PHOS_SOFTGPU_COPY_RATE="8M")) > 0.25
    assert any(float(program.run(code, tmp_path)) < 0.12 for _ in range(10))  # others may run


def test_per_thread_default_streams_are_functions_of_their_own(tmp_path: Path) -> None:
    program.run(
        """
lib = ctypes.CDLL("libcuda.so.1")
def lookup(name, version, flags):
    found, status = ctypes.c_void_p(), ctypes.c_int()
    assert lib.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), version,
                                   ctypes.c_uint64(flags), ctypes.byref(status)) == 0
    return found.value, status.value
address = lambda symbol: ctypes.cast(getattr(lib, symbol), ctypes.c_void_p).value
for name, symbol, suffix in [("cuLaunchKernel", "cuLaunchKernel", "_ptsz"),
                             ("cuMemcpyHtoD", "cuMemcpyHtoD_v2", "_ptds"),
                             ("cuGraphLaunch", "cuGraphLaunch", "_ptsz")]:
    assert lookup(name, 13000, 1)[0] == lookup(name, 13000, 0)[0] == address(symbol)
    assert lookup(name, 13000, 2)[0] == address(symbol + suffix) != address(symbol)
assert lookup("cuMemAlloc", 13000, 2)[0] == address("cuMemAlloc_v2")
assert lookup("cuMemAlloc", 3000, 0) == (None, 2)       # a form too old to be here
assert lookup("cuNothing", 13000, 0) == (None, 1)
assert lookup("cuCtxSynchronize", 12000, 0)[0] == address("cuCtxSynchronize")
assert lookup("cuCtxSynchronize", 13000, 0)[0] == address("cuCtxSynchronize_v2")
""",
        tmp_path,
    )


def test_a_capture_becomes_a_graph_that_runs(tmp_path: Path) -> None:
    program.run(
        """
use()
n = 1024
p, q = ck(d.cuMemAlloc(4 * n)), ck(d.cuMemAlloc(4 * n))
s, t = ck(d.cuStreamCreate(1)), ck(d.cuStreamCreate(1))
fork, join = ck(d.cuEventCreate(2)), ck(d.cuEventCreate(2))
GLOBAL = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
ck(d.cuMemsetD32(q, 0, n)); ck(d.cuCtxSynchronize())
ck(d.cuStreamBeginCapture(s, GLOBAL))
ck(d.cuMemsetD32Async(p, 5, n, s)); ck(d.cuEventRecord(fork, s))
ck(d.cuStreamWaitEvent(t, fork, 0))
ck(d.cuMemcpyDtoDAsync(q, p, 4 * n, t)); ck(d.cuEventRecord(join, t))
ck(d.cuStreamWaitEvent(s, join, 0))
assert code(d.cuEventQuery(join)) == "ERROR_CAPTURED_EVENT"
assert code(d.cuStreamEndCapture(s)) == "ERROR_STREAM_CAPTURE_INVALIDATED"
ck(d.cuStreamBeginCapture(s, GLOBAL))
ck(d.cuMemsetD32Async(p, 5, n, s)); ck(d.cuEventRecord(fork, s))
ck(d.cuStreamWaitEvent(t, fork, 0))
ck(d.cuMemcpyDtoDAsync(q, p, 4 * n, t))
assert code(d.cuStreamEndCapture(s)) == "ERROR_STREAM_CAPTURE_UNJOINED"
ck(d.cuStreamBeginCapture(s, GLOBAL))
ck(d.cuMemsetD32Async(p, 5, n, s)); ck(d.cuEventRecord(fork, s))
ck(d.cuStreamWaitEvent(t, fork, 0))
ck(d.cuMemcpyDtoDAsync(q, p, 4 * n, t)); ck(d.cuEventRecord(join, t))
ck(d.cuStreamWaitEvent(s, join, 0))
graph = ck(d.cuStreamEndCapture(s))
assert ck(d.cuGraphGetNodes(graph, 8))[1] == 2
executable = ck(d.cuGraphInstantiate(graph, 0))
assert (fetch(q, n) == 0).all()                     # a capture runs nothing
ck(d.cuGraphLaunch(executable, s)); ck(d.cuStreamSynchronize(s))
assert (fetch(q, n) == 5).all()
ck(d.cuMemsetD32(q, 0, n)); ck(d.cuCtxSynchronize())    # s waits for no work of stream 0
ck(d.cuGraphDestroy(graph))
ck(d.cuGraphLaunch(executable, s)); ck(d.cuStreamSynchronize(s)); assert (fetch(q, n) == 5).all()
""",
        tmp_path,
    )


def test_user_objects_of_graphs_are_destroyed_once(tmp_path: Path) -> None:
    """A clone and an instance hold what their graph held; an update replaces it; a launch under way
    keeps it; and what a graph gave back is not given back again when the graph ends."""
    program.run(
        """
use(); gone = []
HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
destroy = HOST(gone.append)
def made(number):
    function = ctypes.cast(destroy, ctypes.c_void_p).value
    graph = ck(d.cuGraphCreate(0)); ck(d.cuGraphAddEmptyNode(graph, None, 0))
    return graph, ck(d.cuUserObjectCreate(number, d.CUhostFn(function), 1, 1))

graph, thing = made(1)
ck(d.cuGraphRetainUserObject(graph, thing, 1, 1))           # moved: the graph's now
ck(d.cuGraphRetainUserObject(graph, thing, 2, 0))
ck(d.cuGraphReleaseUserObject(graph, thing, 1)); assert gone == []
assert code(d.cuGraphReleaseUserObject(graph, thing, 3)) == "ERROR_INVALID_VALUE"
ck(d.cuGraphReleaseUserObject(graph, thing, 2)); assert gone == [1]
assert code(d.cuUserObjectRetain(thing, 1)) == "ERROR_INVALID_VALUE"
ck(d.cuGraphDestroy(graph)); assert gone == [1]

graph, thing = made(2); ck(d.cuGraphRetainUserObject(graph, thing, 1, 1))
clone = ck(d.cuGraphClone(graph)); instance = ck(d.cuGraphInstantiate(graph, 0))
ck(d.cuGraphDestroy(graph)); ck(d.cuGraphDestroy(clone)); assert gone == [1]
other, thing = made(3); ck(d.cuGraphRetainUserObject(other, thing, 1, 1))
ck(d.cuGraphExecUpdate(instance, other)); assert gone == [1, 2]
ck(d.cuGraphDestroy(other)); assert gone == [1, 2]
s = ck(d.cuStreamCreate(1)); flag = ck(d.cuMemAlloc(4)); ck(d.cuMemsetD32(flag, 0, 1))
ck(d.cuCtxSynchronize()); ck(d.cuStreamWaitValue32(s, flag, 1, 0)); ck(d.cuGraphLaunch(instance, s))
ck(d.cuGraphExecDestroy(instance)); assert gone == [1, 2]
t = ck(d.cuStreamCreate(1)); ck(d.cuStreamWriteValue32(t, flag, 1, 0)); ck(d.cuStreamSynchronize(s))
assert gone == [1, 2, 3]
""",
        tmp_path,
    )


CAPTURES = """
use(); s = ck(d.cuStreamCreate(1)); modes = d.CUstreamCaptureMode
event = ck(d.cuEventCreate(0)); context = ck(d.cuCtxGetCurrent())
def from_other_thread(call, relaxed):
    def body():
        use()
        if relaxed:
            ck(d.cuThreadExchangeStreamCaptureMode(modes.CU_STREAM_CAPTURE_MODE_RELAXED))
        results.append(code(call()))
    results = []; thread = threading.Thread(target=body); thread.start(); thread.join()
    return results[0]
def begin(mode):
    ck(d.cuStreamBeginCapture(s, getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}")))
def ends_well():
    ck(d.cuStreamEndCapture(s))
def is_dead():
    assert code(d.cuStreamEndCapture(s)) == "ERROR_STREAM_CAPTURE_INVALIDATED"
"""


def test_a_question_kills_a_capture_unless_relaxed(tmp_path: Path) -> None:
    program.run(
        CAPTURES
        + """
ask = lambda: d.cuEventQuery(event)
begin("GLOBAL"); assert from_other_thread(ask, True) == "SUCCESS"; ends_well()
begin("GLOBAL"); assert from_other_thread(ask, False) == "ERROR_STREAM_CAPTURE_UNSUPPORTED"
is_dead()
begin("THREAD_LOCAL"); assert from_other_thread(ask, False) == "SUCCESS"
assert code(d.cuMemAlloc(16)) == "ERROR_STREAM_CAPTURE_UNSUPPORTED"
is_dead()
begin("THREAD_LOCAL"); assert code(d.cuMemFree(0)) == "ERROR_STREAM_CAPTURE_UNSUPPORTED"
is_dead()
begin("RELAXED"); ck(d.cuMemFree(ck(d.cuMemAlloc(16)))); ck(d.cuMemFree(0)); ends_well()
""",
        tmp_path,
    )


def test_a_call_for_a_whole_context_kills_every_capture_in_it(tmp_path: Path) -> None:
    """As on an H200, whatever the modes of the capture and of the thread."""
    program.run(
        CAPTURES
        + """
for call in (d.cuCtxSynchronize, lambda: d.cuCtxRecordEvent(context, event)):
    for mode in ("GLOBAL", "THREAD_LOCAL", "RELAXED"):
        for relaxed in (True, False):
            begin(mode)
            assert from_other_thread(call, relaxed) == "ERROR_STREAM_CAPTURE_UNSUPPORTED"
            is_dead()
ck(d.cuCtxSynchronize())
""",
        tmp_path,
    )


def test_the_pool_reuses_in_stream_order(tmp_path: Path) -> None:
    program.run(
        """
use(); s = ck(d.cuStreamCreate(1)); flag = ck(d.cuMemAlloc(8)); ck(d.cuMemsetD32(flag, 0, 2))
ck(d.cuCtxSynchronize())
a = ck(d.cuMemAllocAsync(20 << 20, s))
ck(d.cuStreamWaitValue32(s, flag, 1, 0))
ck(d.cuMemsetD32Async(a, 1, 5 << 20, s)); ck(d.cuMemFreeAsync(a, s))
assert code(d.cuMemFreeAsync(a, s)) == "ERROR_INVALID_VALUE"
assert ck(d.cuMemGetInfo())[0] == (32 - 22) << 20    # the free has not run yet
timer = threading.Timer(0.1, lambda: (use(), d.cuStreamWriteValue32(t, flag, 1, 0)))
t = ck(d.cuStreamCreate(1)); timer.start()
b = ck(d.cuMemAllocAsync(20 << 20, s))              # fits only once the free has run
ck(d.cuMemsetD32Async(b, 2, 5 << 20, s)); ck(d.cuStreamSynchronize(s)); timer.join()
assert (fetch(b, 5 << 20) == 2).all()
""",
        tmp_path,
        PHOS_SOFTGPU_MEMORY="32M",
    )
