"""A launcher: it asks about GPUs, as it is told, and starts another process that does its work.

``launcher.py STEPS STATE...`` has one process for each state, each started by the one before. The
last one computes if its state is ``context``, else it only counts. Each but the last asks again,
with each step of the last one, what it asked at its start, and ends the program if the answer has
changed. States: ``nothing``; ``nvml``, ``nvml-shut`` (NVML, begun and shut down); ``libcuda``
(loaded); ``init`` (cuInit); ``released`` (a primary context, retained and released); ``context``.

Environment: ``PHOS_TEST_NVML``, the path of NVML's library, if not the system's;
``PHOS_TEST_BEGINS_CUDA``, a file whose appearance lets the first process retain a context.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gpu

Asks = Callable[[], object]


def _nvml() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ.get("PHOS_TEST_NVML", "libnvidia-ml.so.1"))
    _require(library.nvmlInit_v2())
    return library


def _cuda(*, begun: bool) -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    if begun:
        _require(library.cuInit(0))
    return library


def _require(status: int) -> None:
    if status:
        raise RuntimeError(f"NVML or CUDA answered {status}")


def _count(library: ctypes.CDLL, name: str) -> int:
    count = ctypes.c_uint()
    _require(library[name](ctypes.byref(count)))
    return count.value


def enter(state: str) -> Asks:
    """Enter the state; what it can be asked from then on."""
    if state == "nvml":
        library = _nvml()
        return lambda: _count(library, "nvmlDeviceGetCount_v2")
    if state == "nvml-shut":
        library = _nvml()
        before = _count(library, "nvmlDeviceGetCount_v2")
        _require(library.nvmlShutdown())
        return lambda: before
    if state == "libcuda":
        library = _cuda(begun=False)
        return lambda: _count(library, "cuDriverGetVersion")
    if state == "init":
        library = _cuda(begun=True)
        return lambda: _count(library, "cuDeviceGetCount")
    if state in ("released", "context"):
        library, context = _cuda(begun=True), ctypes.c_void_p()
        _require(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        if state == "released":
            _require(library.cuDevicePrimaryCtxRelease_v2(0))
        return lambda: _count(library, "cuDeviceGetCount")
    return lambda: None


def _begin_cuda(told: Path) -> None:
    while not told.exists():
        time.sleep(0.01)
    enter("context")


def launch(steps: str, state: str, below: list[str]) -> None:
    """Start the processes below, and hand on their lines, asking with each."""
    asks = enter(state)
    first = asks()
    command = [sys.executable, __file__, steps, *below]
    if told := os.environ.pop("PHOS_TEST_BEGINS_CUDA", ""):
        threading.Thread(target=_begin_cuda, args=(Path(told),), daemon=True).start()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if asks() != first:
                raise RuntimeError(f"{state}: not {first} any more")
            os.write(1, line)


def work(state: str) -> None:
    """Compute on a GPU with a context, else on the processor."""
    report = gpu.Report()
    if state == "context":
        on_gpu = gpu.State(gpu.Device())
        for step in report.steps():
            report.tell(step, on_gpu.step(step, report.seed))
        return
    asks = enter(state)
    first, value = asks(), b""
    for step in report.steps():
        value = hashlib.sha256(value + f"{step} {asks() == first}".encode()).digest()
        report.tell(step, value)


def main() -> None:
    steps, state, *below = sys.argv[1:]
    if below:
        launch(steps, state, below)
    else:
        work(state)


if __name__ == "__main__":
    main()
