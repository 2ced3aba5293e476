"""Hold tensors in device memory as PyTorch's allocator places them, and train some of them.

Reads a JSON object from its standard input: ``segments`` has the bytes of each allocation, and
``tensors`` the segment, offset, length in bytes, name of each tensor and whether it is trained. A
tensor's bytes follow from its name; those of one that is trained also from the step. Prints the
number of each step, one each time it reads a line. Uses the driver alone.
"""

import ctypes
import json
import random
import sys
from typing import Any


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.stdin.readline())
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name} answered with {status}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    segments = []
    for size in plan["segments"]:
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        segments.append(address.value)

    def fill(step: int, *, trained: bool) -> None:
        for segment, offset, length, name, changes in plan["tensors"]:
            if changes >= trained:
                seed = f"{name} {step}" if changes else name
                content = random.Random(seed).randbytes(length)
                place = ctypes.c_uint64(segments[segment] + offset)
                call("cuMemcpyHtoD_v2", place, content, ctypes.c_size_t(length))

    fill(0, trained=False)
    print(0, flush=True)
    for step, _ in enumerate(sys.stdin, 1):
        fill(step, trained=True)
        print(step, flush=True)


if __name__ == "__main__":
    main()
