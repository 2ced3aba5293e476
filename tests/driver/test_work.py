"""Work and its order: what waits for the device, and what the driver tells of work."""

from tests.driver.conftest import Starter
from tests.driver.subjects import A_WHILE

STREAM = (
    "context = use(); s = ck(d.cuStreamCreate({kind})); flag = Flag(); p = ck(d.cuMemAlloc(16))\n"
)
BLOCKING, NON_BLOCKING = 0, 1
CAPTURES = """
context = use(); s, event = ck(d.cuStreamCreate(1)), ck(d.cuEventCreate(0))
def mode(name): return getattr(d.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{name}")
def meanwhile(call, relaxed, kind):
    def body():
        if relaxed: ck(d.cuThreadExchangeStreamCaptureMode(mode("RELAXED")))
        return call()
    ck(d.cuStreamBeginCapture(s, mode(kind)))
    answer = Begun(body).within(30)
    return answer, code(d.cuStreamEndCapture(s))
"""
UNSUPPORTED = ["ERROR_STREAM_CAPTURE_UNSUPPORTED", "ERROR_STREAM_CAPTURE_INVALIDATED"]


def test_contexts_keep_work_of_destroyed_streams(start: Starter) -> None:
    program = start(
        STREAM.format(kind=NON_BLOCKING)
        + "e = ck(d.cuEventCreate(2)); flag.hold(s); ck(d.cuStreamDestroy(s))\n"
        "ck(d.cuCtxRecordEvent(context, e))"
    )
    assert program.do("d.cuEventQuery(e)") == "ERROR_NOT_READY"
    assert program.do("d.cuStreamQuery(0)") == "SUCCESS", "the legacy stream waits for it, too"
    program.ask("flag.rise()")
    assert program.do("d.cuCtxSynchronize()") == "SUCCESS"
    assert program.do("d.cuEventQuery(e)") == "SUCCESS"


def test_waiting_copies_hold_submissions(start: Starter) -> None:
    program = start(
        STREAM.format(kind=BLOCKING)
        + "e, other, out = ck(d.cuEventCreate(2)), ck(d.cuStreamCreate(1)), bytearray(16)\n"
        "flag.hold(s); copy = Begun(lambda: d.cuMemcpyDtoH(out, p, 16))"
    )
    within = f"within({A_WHILE})"
    assert program.ask(f"copy.{within}") == "", "the copy did not wait for the device"
    for query in ("d.cuStreamQuery(s)", "d.cuStreamQuery(other)"):
        program.tell(f"code({query})")
        assert not program.is_silent(10), f"{query} waits for the copy"
        assert program.answer() in ("ERROR_NOT_READY", "SUCCESS")
    program.tell("mapped(make()) and True")
    assert not program.is_silent(10), "virtual memory management waits for the copy"
    assert program.answer()
    program.ask("asked = Begun(lambda: d.cuCtxRecordEvent(context, e))")
    assert program.ask(f"asked.{within}") == "", "cuCtxRecordEvent did not wait for the copy"
    program.ask("flag.rise()")
    assert program.ask("[copy.within(30), asked.within(30)]") == ["SUCCESS", "SUCCESS"]


def test_frees_wait_for_the_device(start: Starter) -> None:
    program = start(STREAM.format(kind=NON_BLOCKING) + "flag.hold(s)")
    program.ask("freed = Begun(lambda: d.cuMemFree(p))")
    assert program.ask(f"freed.within({A_WHILE})") == "", "cuMemFree did not wait for the device"
    program.ask("flag.rise()")
    assert program.ask("freed.within(30)") == "SUCCESS"


def test_relaxed_threads_spare_captures(start: Starter) -> None:
    program = start(CAPTURES + "ask = lambda: d.cuEventQuery(event)")
    assert program.ask("meanwhile(ask, True, 'GLOBAL')") == ["SUCCESS", "SUCCESS"]
    assert program.ask("meanwhile(ask, False, 'GLOBAL')") == UNSUPPORTED
    assert program.ask("meanwhile(ask, False, 'THREAD_LOCAL')") == ["SUCCESS", "SUCCESS"]


def test_whole_contexts_end_captures(start: Starter) -> None:
    program = start(CAPTURES + "ask = lambda: d.cuCtxRecordEvent(context, event)")
    for kind in ("GLOBAL", "THREAD_LOCAL", "RELAXED"):
        for relaxed in (True, False):
            answers = program.ask(f"meanwhile(ask, {relaxed}, '{kind}')")
            assert answers == UNSUPPORTED, f"a {kind} capture, a relaxed thread: {relaxed}"


def test_one_name_has_two_functions(start: Starter) -> None:
    program = start(
        "use(); driver = library()\n"
        "def look(flags):\n found = ctypes.c_void_p()\n"
        " name = b'cuLaunchKernel'; flags = ctypes.c_uint64(flags)\n"
        " answer = driver.cuGetProcAddress_v2(name, ctypes.byref(found), 12000, flags, None)\n"
        " assert answer == 0, answer\n"
        " return found.value"
    )
    legacy, per_thread, again = program.ask("[look(flags) for flags in (1, 2, 1)]")
    assert legacy == again != per_thread
