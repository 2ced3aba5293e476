"""Measure how fast the GPU hashes, and compare its digests with the CPU's. Prints one JSON object.

    python bench/digest.py [--gib N] [--rounds N]

``share`` is the rate relative to the device's own copy rate (bytes read and written), measured
here.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from phosd.engine.digest import DigestKey, digest_buffer, split
from phosd.engine.image.manifest import CHUNK
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.system.cuda import call

CHECKED = 4 * CHUNK


def timed(rounds: int, work: Callable[[], None]) -> list[float]:
    """Return the seconds of each round on the device, after one warm-up round."""
    start, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
    seconds = []
    for _ in range(rounds + 1):
        call("cuEventRecord", start, 0)
        work()
        call("cuEventRecord", end, 0)
        call("cuEventSynchronize", end)
        seconds.append(float(call("cuEventElapsedTime", start, end)) / 1000)
    return seconds[1:]


def equal(gpu: Gpu, key: DigestKey, contents: Sequence[bytes]) -> bool:
    """Whether the GPU's digests of the contents equal the CPU's."""
    address = gpu.block(0).address
    for content in contents:
        call("cuMemcpyHtoD", address, content, len(content))
        mine = split(gpu.digest([0])[0])[: len(content) // CHUNK]
        if mine != digest_buffer(key, content):
            return False
    return True


def lengths_equal(gpu: Gpu, key: DigestKey) -> bool:
    """Whether digests agree for chunks that are no multiple of the bytes per round of the
    kernel.
    """
    content = os.urandom(CHUNK)
    address = gpu.block(0).address
    call("cuMemcpyHtoD", address, content, CHUNK)
    table = int(call("cuMemAlloc", 4096))
    for length in (16, 512, 4096, 4112, 32768 + 48, CHUNK - 16):
        entry = address.to_bytes(8, "little") + length.to_bytes(8, "little")
        call("cuMemcpyHtoD", table, entry, 16)
        gpu.launch_digest(0, table, 1, table + 16)
        result = bytearray(16)
        call("cuMemcpyDtoH", result, table + 16, 16)
        if bytes(result) != digest_buffer(key, content[:length])[0]:
            return False
    return True


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, help="device memory to hash (default: most of it)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block-mib", type=int, default=64, help="8 or more")
    options = parser.parse_args()
    key = DigestKey(os.urandom(32))
    gpu = Gpu(0, key)
    free, _ = gpu.free_memory()
    block = options.block_mib << 20
    wanted = int(options.gib * 2**30) if options.gib else min(64 << 30, free * 3 // 4)
    count = max(2, wanted // block)
    for fd in gpu.create([(i, block) for i in range(count)]):
        os.close(fd)
    for i in range(count):
        call("cuMemsetD32", gpu.block(i).address, 0x9E3779B9 * (i + 1) & 0xFFFFFFFF, block // 4)

    table = b"".join(gpu.block(i).table for i in range(count))
    chunks = len(table) // 16
    on_device = int(call("cuMemAlloc", 2 * len(table)))
    call("cuMemcpyHtoD", on_device, table, len(table))
    total = count * block

    def hash_all() -> None:
        gpu.launch_digest(0, on_device, chunks, on_device + len(table))

    def copy_half() -> None:
        for i in range(count // 2):
            source, target = gpu.block(i).address, gpu.block(count // 2 + i).address
            call("cuMemcpyDtoDAsync", target, source, block, 0)

    hashed = statistics.median(timed(options.rounds, hash_all))
    copied = statistics.median(timed(options.rounds, copy_half))
    copy_rate = 2 * (count // 2) * block / copied
    result: dict[str, Any] = {
        "case": "digest",
        "device": call("cuDeviceGetName", 64, gpu.device).split(b"\0")[0].decode(),
        "bytes": total,
        "chunks": chunks,
        "ms": round(hashed * 1e3, 3),
        "gb_s": round(total / hashed / 1e9, 1),
        "copy_gb_s": round(copy_rate / 1e9, 1),
        "share": round(total / hashed / copy_rate, 3),
        "equal": equal(gpu, key, [bytes(CHECKED), b"\xff" * CHECKED, os.urandom(CHECKED)]),
        "lengths_equal": lengths_equal(gpu, key),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
