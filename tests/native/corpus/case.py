"""What one kernel of the corpus is: its source, how it is launched, and how its outputs compare."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Reference = Callable[..., Array | list[Array]]


@dataclass(frozen=True)
class Case:
    """A kernel `k` with inputs and outputs as device arrays.

    Its arguments are the inputs, the outputs, then `scalars`, in this order. Outputs begin as
    zeros. `ulps` is the distance that approximate functions may have between two devices (0: the
    bits are equal); `reference` computes the outputs from the inputs on the CPU.
    """

    name: str
    source: str
    inputs: list[Array]
    outputs: list[tuple[str, int]]  # NumPy type and number of elements
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (256, 1, 1)
    shared: int = 0  # bytes of dynamic shared memory
    scalars: tuple[np.generic | Array, ...] = ()
    arch: str = "compute_75"
    ulps: int = 0
    absolute: float = 0.0
    cooperative: bool = False
    reference: Reference | None = None


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


_EDGES_F32 = np.array(
    [0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
     1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x4F000000, 0xCF000000,
     0x4F7FFFFF, 0x3F000000, 0x3FC00000, 0x40200000],
    np.uint32,
)  # fmt: skip


def bits32(generator: np.random.Generator, count: int) -> Array:
    """Every kind of f32: random bits behind the edge cases."""
    bits = generator.integers(0, 1 << 32, count, dtype=np.uint32)
    near = generator.integers(0x38000000, 0x47000000, count // 2, dtype=np.uint32)
    bits[: count // 2] = near | (bits[: count // 2] & 0x80000000)
    edges = np.tile(_EDGES_F32, 4)
    bits[: len(edges)] = generator.permutation(edges)
    values: Array = generator.permutation(bits).view(np.float32)
    return values


def bits64(generator: np.random.Generator, count: int, span: int = 200) -> Array:
    """f64 without NaNs, with exponents up to `span` from 1, infinities and zeros among them."""
    mantissa = generator.integers(0, 1 << 52, count, dtype=np.uint64)
    exponent = generator.integers(1023 - span, 1023 + span, count, dtype=np.uint64)
    sign = generator.integers(0, 2, count, dtype=np.uint64)
    values: Array = (mantissa | exponent << np.uint64(52) | sign << np.uint64(63)).view(np.float64)
    values[:4] = [0.0, -0.0, 1.0, -2.5]
    return values


def integers(generator: np.random.Generator, count: int, dtype: str) -> Array:
    info = np.iinfo(dtype)
    values = generator.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    small = generator.integers(0, 100, count // 4).astype(dtype)
    values[: len(small)] = small
    edges = [info.min, info.max, 0, 1, info.max - 1, info.min + 1]
    values[-len(edges) :] = np.array(edges, dtype)
    shuffled: Array = generator.permutation(values)
    return shuffled


CTYPES = {
    "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
    "int32": "int", "uint32": "unsigned", "int64": "long long", "uint64": "unsigned long long",
    "float32": "float", "float64": "double",
}  # fmt: skip

COUNT = 4096


def elementwise(
    name: str,
    body: str,
    inputs: list[Array],
    output: str,
    reference: Reference | None = None,
    *,
    prelude: str = "",
    arch: str = "compute_75",
    ulps: int = 0,
    absolute: float = 0.0,
) -> Case:
    """`r` from `a`, `b`, `c`, one element of each input; `body` assigns it."""
    letters = "abcd"[: len(inputs)]
    pointers = ", ".join(
        f"const {CTYPES[array.dtype.name]}* p{letter}"
        for letter, array in zip(letters, inputs, strict=True)
    )
    values = " ".join(
        f"const {CTYPES[array.dtype.name]} {letter} = p{letter}[i];"
        for letter, array in zip(letters, inputs, strict=True)
    )
    count = len(inputs[0])
    source = f"""{prelude}
extern "C" __global__ void k({pointers}, {CTYPES[output]}* out, int count) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    {values}
    {CTYPES[output]} r;
    {body}
    out[i] = r;
}}"""
    return Case(
        name, source, inputs, [(output, count)], grid=((count + 255) // 256, 1, 1),
        scalars=(np.int32(count),), arch=arch, ulps=ulps, absolute=absolute, reference=reference,
    )  # fmt: skip
