"""Allocating and freeing while a stream is captured: what the driver allows, and nothing else."""

import subprocess
import sys
from pathlib import Path

from tests.native.hook.live import PRELUDE
from tests.support.harness import PATIENCE, environment, users_hooks

CAPTURES = """
import threading

context = primary(0)
stream, other = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
modes = [getattr(driver.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{name}")
         for name in ("GLOBAL", "THREAD_LOCAL", "RELAXED")]

def name(result):
    return result[0].name.removeprefix("CUDA_")

def alloc_and_free():
    result = driver.cuMemAlloc(3 << 20)
    return name(result), name(driver.cuMemFree(result[1])) if name(result) == "SUCCESS" else None

def reuse():
    # Freed on another stream before; whether that is over is asked on the way.
    at = ok(driver.cuMemAllocAsync(3 << 20, other))
    ok(driver.cuMemFreeAsync(at, other))
    ok(driver.cuMemAllocAsync(3 << 20, third))
    return "reused"

def calls():
    kept = ok(driver.cuMemAlloc(1000))
    yield "alloc", lambda: name(driver.cuMemAlloc(1000))
    yield "alloc nothing", lambda: name(driver.cuMemAlloc(0))
    yield "alloc and free", alloc_and_free
    yield "pitch", lambda: name(driver.cuMemAllocPitch(600, 5, 4))
    yield "free", lambda: name(driver.cuMemFree(kept))
    yield "free nothing", lambda: name(driver.cuMemFree(0))
    yield "free nonsense", lambda: name(driver.cuMemFree(int(kept) + 8))
    yield "stream-ordered", reuse

def in_thread(call, mode):
    said = []
    def body():
        ok(driver.cuCtxSetCurrent(context))
        ok(driver.cuThreadExchangeStreamCaptureMode(mode))
        said.append(call())
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return said[0]

third = ok(driver.cuStreamCreate(1))
for mode in modes:
    for own in (True, False):
        for thread_mode in modes:
            for what, call in calls():
                ok(driver.cuStreamBeginCapture(stream, mode))
                if own:
                    before = ok(driver.cuThreadExchangeStreamCaptureMode(thread_mode))
                    said = call()
                    ok(driver.cuThreadExchangeStreamCaptureMode(before))
                else:
                    said = in_thread(call, thread_mode)
                end = name(driver.cuStreamEndCapture(stream))
                say(mode.name, "own" if own else "other", thread_mode.name, what, said, end)
"""


def test_captures_meet_what_they_would_without_it(tmp_path: Path) -> None:
    """Every mode of capture and thread: the answers, and whether the capture lives on."""
    users_hooks(tmp_path)
    outputs = []
    for hooked in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + CAPTURES],
            env=environment(hooked=hooked, runtime=tmp_path),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stderr) == (0, "")
        outputs.append(done.stdout.splitlines())
    plain, hooked_output = outputs
    assert len(plain) == 144
    refused = [line for line in plain if "STREAM_CAPTURE_UNSUPPORTED" in line]
    assert len(refused) == 5 * 7  # combinations of modes that forbid, and what they forbid
    assert hooked_output == plain
