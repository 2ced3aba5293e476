"""A process, and a child of it, that use CUDA without anything but ctypes, as any Python can.

Each counts in device memory, while three of its threads ask without rest whether a stream and an
event are done. Arguments: the driver's library, and the file for the child's numbers.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

POLLERS = 3
SUCCESS, NOT_READY = 0, 600
DISABLE_TIMING = 2


def main() -> None:
    library, numbers = sys.argv[1:]
    if os.fork() == 0:
        with Path(numbers).open("a") as file:
            os.dup2(file.fileno(), 1)
    cuda = ctypes.CDLL(library)

    def ok(status: int) -> None:
        if status != SUCCESS:
            raise RuntimeError(f"the driver answered with {status}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    address, event = ctypes.c_uint64(), ctypes.c_void_p()
    ok(cuda.cuInit(0))
    ok(cuda.cuDeviceGet(ctypes.byref(device), 0))
    ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    ok(cuda.cuCtxSetCurrent(context))
    ok(cuda.cuMemAlloc_v2(ctypes.byref(address), 4096))
    ok(cuda.cuEventCreate(ctypes.byref(event), DISABLE_TIMING))
    wrong: list[int] = []

    def poll() -> None:
        ok(cuda.cuCtxSetCurrent(context))
        while not wrong:
            answers = (cuda.cuStreamQuery(None), cuda.cuEventQuery(event))
            wrong.extend(each for each in answers if each not in (SUCCESS, NOT_READY))

    for _ in range(POLLERS):
        threading.Thread(target=poll, daemon=True).start()
    value = ctypes.c_uint64(0)
    ok(cuda.cuMemcpyHtoD_v2(address, ctypes.byref(value), ctypes.sizeof(value)))
    while not wrong:
        ok(cuda.cuMemcpyDtoH_v2(ctypes.byref(value), address, ctypes.sizeof(value)))
        value.value += 1
        ok(cuda.cuMemcpyHtoD_v2(address, ctypes.byref(value), ctypes.sizeof(value)))
        ok(cuda.cuEventRecord(event, None))
        print(value.value, flush=True)
        time.sleep(0.01)
    sys.exit(f"polling was answered with {wrong}")


if __name__ == "__main__":
    main()
