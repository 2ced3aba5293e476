"""Start actors that compute on the GPU, as Ray does, from a process that only counts GPUs.

    python tree.py [--actors N]

The driver process asks NVML and CUDA how many GPUs there are. Its children are a monitor, which
has NVML alone, and a manager, which has nothing of the GPU and starts the actors.
"""

import argparse
import ctypes
import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import recurrence
from cuda.bindings import driver
from device import ok
from lines import print_lines

_CONTEXT = multiprocessing.get_context("spawn")


def _counted_by_nvml() -> int:
    nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
    for call, *words in (("nvmlInit_v2",), ("nvmlDeviceGetCount_v2", ctypes.byref(count))):
        if status := getattr(nvml, call)(*words):
            raise RuntimeError(f"{call} answered with {status}")
    return count.value


def _monitor(asked: Any) -> None:
    count = _counted_by_nvml()
    while True:
        asked.send(count * asked.recv())


def _actor(asked: Any) -> None:
    values = recurrence.values(1 << 18, 0.0)
    while True:
        asked.send(asked.recv() + next(values))


def _manager(asked: Any, actors: int) -> None:
    others = [_started(_actor) for _ in range(actors)]
    while True:
        number = asked.recv()
        for each in others:
            each.send(number)
        asked.send(sum(each.recv() for each in others))


def _started(work: Any, *words: Any) -> Any:
    """Start a process, and return the end of the pipe to it."""
    own, other = _CONTEXT.Pipe()
    _CONTEXT.Process(target=work, args=(other, *words)).start()
    return own


def values(actors: int) -> Iterator[float]:
    ok(driver.cuInit(0))
    if _counted_by_nvml() < ok(driver.cuDeviceGetCount()):
        raise RuntimeError("NVML counts fewer GPUs than CUDA")
    children = [_started(_monitor), _started(_manager, actors)]
    for number in itertools.count():
        for each in children:
            each.send(number)
        yield sum(each.recv() for each in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=3)
    print_lines(values(parser.parse_args().actors))


if __name__ == "__main__":
    main()
