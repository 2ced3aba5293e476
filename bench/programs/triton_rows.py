"""Iterate a Triton softmax over a large matrix, without knowing of phosd.

Prints one line per iteration: number, a sum as a hexadecimal float, seconds, and end on the
monotonic clock.

    python triton_rows.py [--rows N] [--resident GB]
"""

import argparse
import time

import torch
import triton
import triton.language as tl

COLUMNS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def mix(source, target, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the softmax of one row to half of the row."""
    row = tl.program_id(0)
    at = row * size + tl.arange(0, size)
    values = tl.load(source + at)
    exponents = tl.exp(values - tl.max(values, axis=0))
    tl.store(target + at, values * 0.5 + exponents / tl.sum(exponents, axis=0))


def sample(resident: torch.Tensor) -> float:
    """Return the sum of about a thousand of its bytes."""
    return float(resident[:: max(1, len(resident) // 1000)].double().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1 << 19)
    parser.add_argument(
        "--resident", type=int, default=0, help="GB that are written once, at first"
    )
    arguments = parser.parse_args()
    torch.manual_seed(1)
    resident = torch.full((arguments.resident * 10**9,), 7, dtype=torch.uint8, device="cuda")
    source = torch.randn(arguments.rows, COLUMNS, device="cuda")
    target = torch.empty_like(source)
    number = 0
    while True:
        start = time.monotonic()
        for _ in range(10):
            mix[(arguments.rows,)](source, target, COLUMNS)
            source, target = target, source
        value = source[:: arguments.rows // 64].double().sum().item() + sample(resident)
        end = time.monotonic()
        print(number, value.hex(), f"{end - start:.6f} {end:.6f}", flush=True)
        number += 1


if __name__ == "__main__":
    main()
