"""All kernels of the corpus, and how two devices' outputs are compared."""

from __future__ import annotations

import hashlib

import numpy as np

from tests.native.corpus import control_cases, integer_cases, memory_cases, real_cases, warp_cases
from tests.native.corpus.case import Array, Case


def cases() -> list[Case]:
    every = [
        case
        for family in (integer_cases, real_cases, memory_cases, warp_cases, control_cases)
        for case in family.cases()
    ]
    names = [case.name for case in every]
    if len(set(names)) != len(names):
        raise ValueError("two kernels of the corpus share a name")
    return every


def approximate(case: Case) -> bool:
    return case.ulps > 0 or case.absolute > 0


def digest(array: Array) -> Array:
    """What is recorded of an output that must be equal bit for bit: 16 bytes."""
    return np.frombuffer(hashlib.blake2b(array.tobytes(), digest_size=16).digest(), np.uint8)


def _ordered(array: Array) -> Array:
    """Floating-point numbers as integers in the same order, so that differences count ulps."""
    kind = np.int64 if array.dtype.itemsize == 8 else np.int32
    bits = array.view(kind).astype(np.int64)
    least = np.int64(np.iinfo(kind).min)
    return np.where(bits < 0, least - bits, bits)


def differences(case: Case, expected: Array, actual: Array) -> str:
    """Empty when `actual` is close enough to `expected`, else what is wrong."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"{actual.dtype}{actual.shape} instead of {expected.dtype}{expected.shape}"
    bits = f"u{expected.dtype.itemsize}"
    same = expected.view(bits) == actual.view(bits)
    if approximate(case):
        same |= np.isnan(expected) & np.isnan(actual)
        same |= np.abs(_ordered(expected) - _ordered(actual)) <= case.ulps
        with np.errstate(invalid="ignore"):
            same |= np.abs(expected - actual) <= case.absolute
    if same.all():
        return ""
    at = int(np.flatnonzero(~same)[0])
    return (
        f"{np.count_nonzero(~same)} of {same.size} differ, first at {at}: "
        f"{actual[at]!r} ({actual.view(bits)[at]:#x}) instead of "
        f"{expected[at]!r} ({expected.view(bits)[at]:#x})"
    )
