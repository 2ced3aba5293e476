"""Every kind of memory, vectors of it, and atomics."""
# ruff: noqa: E501 (the kernels keep their own lines)

from __future__ import annotations

import numpy as np

from tests.native.corpus.case import Array, Case, integers, rng


def _floats(name: str, count: int) -> Array:
    return (rng(name).integers(-4096, 4096, count) / 64).astype(np.float32)


def _ints(name: str, count: int, limit: int = 1 << 30) -> Array:
    return rng(name).integers(0, limit, count).astype(np.int32)


def _transpose(a: Array) -> Array:
    return a.reshape(64, 64).T.reshape(-1).copy()


def _matmul(a: Array, b: Array) -> Array:
    result = np.zeros((64, 64), np.float32)
    left, right = a.reshape(64, 64), b.reshape(64, 64)
    for k in range(64):  # one fused operation after the other; the inputs' products are exact
        result = (
            result.astype(np.float64) + left[:, k : k + 1].astype(np.float64) * right[k : k + 1]
        ).astype(np.float32)
    return result.reshape(-1)


_STRUCT = np.dtype([("a", "i4"), ("b", "f8"), ("c", "i2", 5), ("d", "i1")], align=True)


def _spaces() -> list[Case]:
    return [
        Case(
            "transpose_shared",
            """__shared__ float tile[16][17];
extern "C" __global__ void k(const float* in, float* out) {
    const int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    tile[threadIdx.y][threadIdx.x] = in[y * 64 + x];
    __syncthreads();
    out[(blockIdx.x * 16 + threadIdx.y) * 64 + blockIdx.y * 16 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}""",
            [_floats("transpose", 4096)], [("float32", 4096)],
            grid=(4, 4, 1), block=(16, 16, 1), reference=_transpose,
        ),
        Case(
            "matmul_dynamic_shared",
            """extern "C" __global__ void k(const float* a, const float* b, float* c) {
    extern __shared__ float tiles[];
    float *x = tiles, *y = tiles + 256;
    const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int t = 0; t < 4; ++t) {
        x[threadIdx.y * 16 + threadIdx.x] = a[row * 64 + t * 16 + threadIdx.x];
        y[threadIdx.y * 16 + threadIdx.x] = b[(t * 16 + threadIdx.y) * 64 + column];
        __syncthreads();
        for (int i = 0; i < 16; ++i) sum = fmaf(x[threadIdx.y * 16 + i], y[i * 16 + threadIdx.x], sum);
        __syncthreads();
    }
    c[row * 64 + column] = sum;
}""",
            [_floats("ma", 4096), _floats("mb", 4096)], [("float32", 4096)],
            grid=(4, 4, 1), block=(16, 16, 1), shared=2048, reference=_matmul,
        ),
        Case(
            "constant_and_globals",
            """__constant__ int table[16] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};
__device__ int counter = 40; __device__ int* pointer = &counter; __constant__ double scale = 2.5;
__device__ short nested[2][3] = {{1, 2, 3}, {-4, -5, -6}};
extern "C" __global__ void k(const int* in, int* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i] % 1000 * table[i & 15] + *pointer + (int)(scale * (i & 7)) + nested[i & 1][i % 3];
}""",
            [_ints("constants", 1024)], [("int32", 1024)], grid=(4, 1, 1),
        ),
        Case(
            "local_array",
            """extern "C" __global__ void k(const int* in, int* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    int sorted[16];
    for (int j = 0; j < 16; ++j) sorted[j] = in[i * 16 + j];
    for (int j = 1; j < 16; ++j)
        for (int m = j; m > 0 && sorted[m - 1] > sorted[m]; --m) {
            const int t = sorted[m]; sorted[m] = sorted[m - 1]; sorted[m - 1] = t;
        }
    for (int j = 0; j < 16; ++j) out[i * 16 + j] = sorted[j];
}""",
            [_ints("local", 4096)], [("int32", 4096)],
            reference=lambda a: np.sort(a.reshape(-1, 16), axis=1).reshape(-1),
        ),
        Case(
            "vectors",
            """struct __align__(8) Pair { int a; float b; };
extern "C" __global__ void k(const int4* in, const Pair* pairs, uchar4* bytes, int4* out, double2* wide) {
    const int i = threadIdx.x;
    const int4 v = in[i]; const Pair p = pairs[i];
    bytes[i] = make_uchar4(v.x, v.y >> 8, v.z >> 16, v.w >> 24);
    out[i] = make_int4(v.w + p.a, v.z, v.y, v.x ^ p.a);
    wide[i] = make_double2(v.x * 0.5, (double)p.b);
}""",
            [_ints("vectors", 1024), _ints("pairs", 512, 1 << 23)],
            [("uint8", 1024), ("int32", 1024), ("float64", 512)],
        ),
        Case(
            "narrow_memory",
            """extern "C" __global__ void k(const signed char* a, const unsigned short* b, short* out, unsigned char* low, long long* wide) {
    const int i = threadIdx.x;
    out[i] = a[i] * 3 - (short)b[i]; low[i] = (unsigned char)(b[i] >> 3); wide[i] = (long long)a[i] << 33 | b[i];
}""",
            [integers(rng("narrow8"), 256, "int8"), integers(rng("narrow16"), 256, "uint16")],
            [("int16", 256), ("uint8", 256), ("int64", 256)],
        ),
        Case(
            "generic_pointers",
            """__device__ __noinline__ int total(const int* p, int n) { int s = 0; for (int i = 0; i < n; ++i) s += p[i]; return s; }
extern "C" __global__ void k(const int* in, int* out) {
    __shared__ int s[256]; int local[8];
    const int i = threadIdx.x;
    s[i] = in[i] & 0xffff; for (int j = 0; j < 8; ++j) local[j] = in[(i + j) & 255] & 0xfff;
    __syncthreads();
    const int* which = i % 3 == 0 ? in : i % 3 == 1 ? s : local;
    out[i] = total(which, 8) + __isShared(s + i) * 2 + __isLocal(local + (i & 7)) * 4 + __isGlobal(in + i) * 8;
}""",
            [_ints("generic", 256, 1 << 20)], [("int32", 256)],
        ),
        Case(
            "struct_parameter",
            """struct S { int a; double b; short c[5]; char d; };
extern "C" __global__ void k(double* out, int n, S s, char c, short h) {
    const int i = threadIdx.x; if (i < n) out[i] = s.a * i + s.b + s.c[i % 5] + s.d + c * 2 + h * 3;
}""",
            [], [("float64", 256)],
            scalars=(
                np.int32(200),
                np.array((7, 2.25, [1, -2, 3, -4, 5], -6), _STRUCT),
                np.int8(-3), np.int16(-300),
            ),
        ),
        Case(
            "volatile_and_fences",
            """extern "C" __global__ void k(const int* in, volatile int* out) {
    __shared__ volatile int s[64];
    const int i = threadIdx.x; s[i] = in[i]; __threadfence_block(); __syncthreads();
    out[i] = s[i ^ 1] + __ldg(in + i) + __ldcg(in + (i ^ 2)) + __ldcs(in + (i ^ 3)); __threadfence(); __threadfence_system();
}""",
            [_ints("volatile", 64)], [("int32", 64)], block=(64, 1, 1),
            reference=lambda a: a[np.arange(64) ^ 1] + a + a[np.arange(64) ^ 2] + a[np.arange(64) ^ 3],
        ),
        Case(
            "async_copy",
            """#include <cuda_pipeline.h>
extern "C" __global__ void k(const int4* in, int4* out) {
    __shared__ int4 s[128];
    __pipeline_memcpy_async(&s[threadIdx.x], &in[threadIdx.x], 16); __pipeline_commit(); __pipeline_wait_prior(0);
    __syncthreads();
    out[threadIdx.x] = s[127 - threadIdx.x];
}""",
            [_ints("async", 512)], [("int32", 512)], block=(128, 1, 1), arch="compute_80",
            reference=lambda a: a.reshape(128, 4)[::-1].reshape(-1).copy(),
        ),
    ]  # fmt: skip


def _histogram(a: Array) -> Array:
    return np.bincount(a & 63, minlength=64).astype(np.int32)


def _atomics() -> list[Case]:
    return [
        Case(
            "histogram",
            """extern "C" __global__ void k(const int* in, int* out) {
    __shared__ int bins[64];
    if (threadIdx.x < 64) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 8192; i += gridDim.x * blockDim.x) atomicAdd(&bins[in[i] & 63], 1);
    __syncthreads();
    if (threadIdx.x < 64) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}""",
            [_ints("histogram", 8192)], [("int32", 64)], grid=(8, 1, 1), reference=_histogram,
        ),
        Case(
            "atomic_integers",
            """extern "C" __global__ void k(const int* in, int* s, unsigned* u, unsigned long long* l) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, v = in[i];
    atomicAdd(s, v); atomicSub(s + 1, v); atomicMin(s + 2, v - (1 << 29)); atomicMax(s + 3, v);
    atomicAnd(s + 4, ~(1 << (v & 31))); atomicOr(s + 5, 1 << (v & 15)); atomicXor(s + 6, v);
    atomicInc(u, 1000); atomicDec(u + 1, 777); atomicMin(u + 2, (unsigned)v); atomicMax(u + 3, (unsigned)v * 3u);
    atomicAdd(l, (unsigned long long)v << 20); atomicMax(l + 1, (unsigned long long)v * v); atomicXor(l + 2, (unsigned long long)v << 13);
}""",
            [_ints("atomics", 2048)], [("int32", 8), ("uint32", 4), ("uint64", 4)], grid=(8, 1, 1),
        ),
        Case(
            "atomic_reals",
            """extern "C" __global__ void k(const float* in, float* f, double* d) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(f + (i & 7), in[i]); atomicAdd(d + (i & 3), (double)in[i] * 0.25);
    __shared__ float s; if (threadIdx.x == 0) s = 0; __syncthreads(); atomicAdd(&s, in[i]); __syncthreads();
    if (threadIdx.x == 0) f[8 + blockIdx.x] = s;
}""",
            [_floats("atomicreals", 1024)], [("float32", 16), ("float64", 4)], grid=(4, 1, 1),
        ),
        Case(
            "atomic_returns",
            """extern "C" __global__ void k(int* slots, int* seen, int* total) {
    const int i = threadIdx.x;
    const int ticket = atomicAdd(total, 1); atomicExch(&slots[ticket], 1);
    int old, assumed = total[1];
    do { old = assumed; assumed = atomicCAS(total + 1, old, old + 3); } while (assumed != old);
    seen[i] = ticket >= 0 && ticket < 256;
}""",
            [], [("int32", 256), ("int32", 256), ("int32", 2)],
        ),
        Case(
            "atomic_halves",
            """#include <cuda_fp16.h>
extern "C" __global__ void k(const int* in, unsigned* out, unsigned short* one) {
    const int i = threadIdx.x;
    atomicAdd((__half2*)out + (i & 3), __floats2half2_rn((float)(in[i] & 3), (float)(in[i] >> 4 & 3)));
    atomicAdd((__half*)one + (i & 1), __float2half((float)(in[i] & 1)));
    atomicCAS(one + 2, (unsigned short)0, (unsigned short)77);
}""",
            [_ints("atomichalves", 256)], [("uint32", 4), ("uint16", 4)],
        ),
    ]  # fmt: skip


def cases() -> list[Case]:
    return _spaces() + _atomics()
