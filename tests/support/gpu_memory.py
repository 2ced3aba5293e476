"""How much of a GPU's memory is free, and a neighbour that has all of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from phosd.engine.node.gpus import list_gpus
from phosd.engine.system import cuda
from phosd.errors import OutOfMemory


@contextmanager
def taken(*gpus: int, but: int = 0) -> Iterator[None]:
    """Somebody has all memory that is left of these GPUs, or of all, ``but`` so many bytes."""
    with ExitStack() as stack:
        for gpu in gpus or range(len(list_gpus())):
            stack.enter_context(_filled(gpu, but))
        yield


@contextmanager
def _filled(gpu: int, but: int) -> Iterator[None]:
    with using(gpu):
        blocks, size = [], 1 << 30
        while size >= 64 << 10:
            if free(gpu) < but + size:
                size //= 2
                continue
            try:
                blocks.append(cuda.call("cuMemAlloc", size))
            except OutOfMemory:
                size //= 2
        try:
            yield
        finally:
            for block in blocks:
                cuda.call("cuMemFree", block)


def free(gpu: int) -> int:
    """Free memory of a GPU, in bytes."""
    with using(gpu):
        return int(cuda.call("cuMemGetInfo")[0])


@contextmanager
def using(gpu: int) -> Iterator[None]:
    """This thread has a context on the GPU inside."""
    cuda.call("cuCtxPushCurrent", cuda.call("cuDevicePrimaryCtxRetain", gpu))
    try:
        yield
    finally:
        cuda.call("cuCtxPopCurrent")
        cuda.call("cuDevicePrimaryCtxRelease", gpu)
