"""Allocates and frees all the time, in all sizes; a block enters the digest when it dies."""

import hashlib
import random
from ctypes import c_uint64 as u64

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok, read

LIVE = 150
SIZES = (256, 4096, 5000, 65536, 300_000, (2 << 20) + 16, 3 << 20)
WEIGHTS = (6, 6, 4, 3, 2, 1, 1)
COMPUTED = 32 << 10
"""Kernels compute on no more than these first bytes of a block."""


def main() -> None:
    report = Report()
    device = Device()
    chance = random.Random(20)
    total = allocate(16)
    died = hashlib.blake2b(digest_size=8)
    live: list[tuple[int, int]] = []
    for step in report.steps():
        for _ in range(12):
            if len(live) < LIVE and chance.random() < 0.6:
                size = chance.choices(SIZES, WEIGHTS)[0]
                address = int(ok(driver.cuMemAlloc(size)))
                ok(driver.cuMemsetD8(address, chance.randrange(256), size))
                live.append((address, size))
            elif live:
                address, size = live.pop(chance.randrange(len(live)))
                device.fold(address, min(size, COMPUTED) // 16 * 16, total)
                died.update(read(address, size))
                ok(driver.cuMemFree(address))
        for address, size in chance.sample(live, min(4, len(live))):
            device.advance(address, min(size, COMPUTED) // 16 * 16, report.seed)
        device.launch("stir", u64(total))
        # The last bytes of a block lie where a wrong size would show.
        address, size = chance.choice(live) if live else (total, 16)
        report.tell(step, read(total, 8) + read(address + size - 16, 16) + died.digest())


if __name__ == "__main__":
    main()
