"""What the threads of a warp and of a block do together."""
# ruff: noqa: E501 (the kernels keep their own lines)

from __future__ import annotations

import numpy as np

from tests.native.corpus.case import Array, Case, rng


def _ints(name: str, count: int, limit: int = 1 << 30) -> Array:
    return rng(name).integers(0, limit, count).astype(np.int32)


def _reduce(a: Array) -> Array:
    sums: Array = a.reshape(-1, 256).sum(axis=1).astype(np.int32)
    return sums


def cases() -> list[Case]:
    head = 'extern "C" __global__ void k(const int* in, int* out) { const int i = blockIdx.x * blockDim.x + threadIdx.x; const int v = in[i]; '
    return [
        Case(
            "shuffles",
            head + """const unsigned all = ~0u; int r = __shfl_sync(all, v, (v >> 3) & 31);
    r = r * 3 + __shfl_up_sync(all, v, v & 7); r = r * 3 + __shfl_down_sync(all, v, 5); r = r * 3 + __shfl_xor_sync(all, v, 9);
    r = r * 3 + __shfl_sync(all, v, v & 63, 8); r = r * 3 + __shfl_up_sync(all, v, 3, 16); r = r * 3 + __shfl_down_sync(all, v, 3, 4);
    out[i] = r; }""",
            [_ints("shuffles", 1024)], [("int32", 1024)], grid=(4, 1, 1),
        ),
        Case(
            "shuffle_predicates",
            head + """int r, p; out[i] = 0;
    asm volatile("{.reg .pred q; shfl.sync.up.b32 %0|q, %2, 4, 0, -1; selp.s32 %1, 1, 0, q;}" : "=r"(r), "=r"(p) : "r"(v)); out[i] += r + p;
    asm volatile("{.reg .pred q; shfl.sync.idx.b32 %0|q, %2, 9, 0x1807, -1; selp.s32 %1, 1, 0, q;}" : "=r"(r), "=r"(p) : "r"(v)); out[i] += r * 3 + p * 7; }""",
            [_ints("shufflep", 256)], [("int32", 256)],
        ),
        Case(
            "shuffle_64",
            """extern "C" __global__ void k(const double* in, double* out) { double v = in[threadIdx.x];
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d); out[threadIdx.x] = v; }""",
            [_ints("shuffle64", 256).astype(np.float64)], [("float64", 256)],
            reference=lambda a: np.repeat(a.reshape(-1, 32).sum(axis=1), 32),
        ),
        Case(
            "votes",
            head + """const unsigned all = ~0u; out[i] = __all_sync(all, v > 5) + __any_sync(all, v > (1 << 29)) * 2 + __popc(__ballot_sync(all, v & 1)) * 4; }""",
            [_ints("votes", 1024)], [("int32", 1024)], grid=(4, 1, 1),
        ),
        Case(
            "divergent_votes",
            head + """int r = 0; if (v & 1) { const unsigned m = __activemask(); r = __popc(__ballot_sync(m, v & 2)); } else r = -1; __syncwarp();
    if (i % 3 == 0) r += __popc(__ballot_sync(0x49249249u << ((3 - ((i & ~31) % 3)) % 3), v & 4)) * 100; out[i] = r; }""",
            [_ints("divergent", 96)], [("int32", 96)], block=(96, 1, 1),
        ),
        Case(
            "matches",
            head + """int p; unsigned r = __match_any_sync(~0u, v & 7); r = r * 3 + __match_all_sync(~0u, v >> 29, &p) + p;
    r = r * 3 + __match_any_sync(~0u, (long long)(v & 3) << 40); out[i] = r; }""",
            [_ints("matches", 256)], [("int32", 256)],
        ),
        Case(
            "warp_reductions",
            head + """const unsigned all = ~0u; int r = __reduce_add_sync(all, v); r = r * 3 + __reduce_min_sync(all, v - 500); r = r * 3 + __reduce_max_sync(all, v);
    r = r * 3 + __reduce_and_sync(all, (unsigned)v | 5); r = r * 3 + __reduce_or_sync(all, (unsigned)v & 99); r = r * 3 + __reduce_xor_sync(all, (unsigned)v); out[i] = r; }""",
            [_ints("redux", 256)], [("int32", 256)], arch="compute_80",
        ),
        Case(
            "tiles",
            """extern "C" __global__ void k(const int* in, int* out) {
    const unsigned lane = threadIdx.x & 31, mine = 0xffu << (lane & 24); int v = in[threadIdx.x];
    if (lane & 8) v *= 2;
    for (int d = 4; d; d >>= 1) v += __shfl_down_sync(mine, v, d, 8);
    if ((lane & 7) == 0) out[threadIdx.x / 8] = v;
    __syncwarp(mine); out[32 + threadIdx.x] = __popc(__ballot_sync(mine, v & 1)) + __match_any_sync(mine, v & 3); }""",
            [_ints("tiles", 256)], [("int32", 32 + 256)],
        ),
        Case(
            "block_reduction",
            """extern "C" __global__ void k(const int* in, int* out) { __shared__ int s[256]; s[threadIdx.x] = in[blockIdx.x * 256 + threadIdx.x]; __syncthreads();
    for (int d = 128; d > 0; d >>= 1) { if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d]; __syncthreads(); }
    if (threadIdx.x == 0) out[blockIdx.x] = s[0]; }""",
            [_ints("block", 2048)], [("int32", 8)], grid=(8, 1, 1), reference=_reduce,
        ),
        Case(
            "barrier_votes",
            head + "out[i] = __syncthreads_count(v & 1) * 16 + __syncthreads_and(v >= 0) * 2 + __syncthreads_or(v > (1 << 30)); }",
            [_ints("barrier", 512)], [("int32", 512)], grid=(2, 1, 1),
        ),
        Case(
            "named_barriers",
            """extern "C" __global__ void k(const int* in, int* out) { __shared__ int box[64]; const int t = threadIdx.x & 63;
    if (threadIdx.x < 64) { box[t] = in[t] * 3; __threadfence_block(); asm volatile("bar.arrive 1, 128;" ::: "memory"); }
    else { asm volatile("bar.sync 1, 128;" ::: "memory"); out[t] = box[63 - t]; } }""",
            [_ints("named", 64)], [("int32", 64)], block=(128, 1, 1), reference=lambda a: (a * np.int32(3))[::-1].copy(),
        ),
        Case(
            "spin_between_warps",
            """extern "C" __global__ void k(const int* in, int* out) { __shared__ volatile int turn; if (threadIdx.x == 0) turn = 0; __syncthreads();
    const int warp = threadIdx.x / 32; if ((threadIdx.x & 31) == 0) { while (turn != warp) { } out[warp] = in[warp] + turn; __threadfence_block(); turn = warp + 1; } }""",
            [_ints("spin", 8)], [("int32", 8)], reference=lambda a: a + np.arange(8, dtype=np.int32),
        ),
        Case(
            "spin_between_lanes",
            """extern "C" __global__ void k(const int* in, int* out) { __shared__ int lock; if (threadIdx.x == 0) { lock = 0; out[0] = 0; } __syncthreads();
    bool done = false; while (!done) { if (atomicCAS(&lock, 0, 1) == 0) { out[0] += in[threadIdx.x]; __threadfence(); atomicExch(&lock, 0); done = true; } } }""",
            [_ints("lanes", 64, 1 << 20)], [("int32", 1)], block=(64, 1, 1), reference=lambda a: np.array([a.sum()], np.int32),
        ),
        Case(
            "grid_barrier",
            """__device__ unsigned arrived;
extern "C" __global__ void k(const int* in, int* part, int* out) { part[blockIdx.x] = in[blockIdx.x] * 2;
    __threadfence(); atomicAdd(&arrived, 1); while (*(volatile unsigned*)&arrived < gridDim.x) { }
    out[blockIdx.x] = part[gridDim.x - 1 - blockIdx.x]; }""",
            [_ints("grid", 16)], [("int32", 16), ("int32", 16)], grid=(16, 1, 1), block=(1, 1, 1), cooperative=True,
            reference=lambda a: [a * np.int32(2), (a * np.int32(2))[::-1].copy()],
        ),
    ]  # fmt: skip
