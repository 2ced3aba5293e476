"""Hold private memory of the host, and compare it with what it was. Prints a line per comparison.

python bench/programs/host_memory.py MIB
"""

import os
import sys
import time
import zlib

PIECE = 1 << 20


def main() -> None:
    memory = bytearray(int(sys.argv[1]) * PIECE)
    for at in range(0, len(memory), PIECE):
        memory[at : at + PIECE] = os.urandom(4096) * (PIECE // 4096)
    right = zlib.crc32(memory)
    while zlib.crc32(memory) == right:
        print(time.time(), flush=True)
    sys.exit("the memory is not what it was")


if __name__ == "__main__":
    main()
