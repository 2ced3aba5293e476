"""The recurrence with files: open to read and write, and changed in each step.

    python writing.py FOLDER [--files N] [--mib N] [--changed N] [--mapped]

Makes N files in FOLDER, of so many MiB in all, and keeps them open; with ``--mapped`` maps them,
too. In each step it overwrites as many pages as ``--changed`` says, at random places. Prints the
values of the recurrence.
"""

import argparse
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

from lines import print_lines
from recurrence import values

_NUMBERS = 1 << 18
_PAUSE = 0.02
_MIB = 1 << 20


def made(folder: Path, count: int, size: int) -> list[int]:
    """Make files of ``size`` bytes that are no holes; return their descriptors."""
    chance, descriptors = random.Random(0), list[int]()
    for number in range(count):
        descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        for at in range(0, size, _MIB):
            os.write(descriptor, chance.randbytes(min(_MIB, size - at)))
        descriptors.append(descriptor)
    return descriptors


def overwritten(descriptors: list[int], size: int, pages: int) -> Iterator[float]:
    """Yield the recurrence's values, and overwrite pages before each."""
    chance, page = random.Random(1), mmap.PAGESIZE
    for value in values(_NUMBERS, _PAUSE):
        for _ in range(pages):
            at = page * chance.randrange(max(1, size // page))
            os.pwrite(chance.choice(descriptors), chance.randbytes(min(page, size)), at)
        yield value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--mib", type=int, default=1, help="bytes of all of them")
    parser.add_argument("--changed", type=int, default=0, help="pages in each step")
    parser.add_argument("--mapped", action="store_true", help="map them shared and writable")
    arguments = parser.parse_args()
    size = (arguments.mib << 20) // max(1, arguments.files)
    descriptors = made(arguments.folder, arguments.files, size)
    maps = [mmap.mmap(each, size) for each in descriptors] if arguments.mapped else []
    print_lines(overwritten(descriptors, size, arguments.changed))
    del maps


if __name__ == "__main__":
    main()
