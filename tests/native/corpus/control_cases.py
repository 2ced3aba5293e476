"""Branches, loops, calls, and the special registers."""
# ruff: noqa: E501 (the kernels keep their own lines)

from __future__ import annotations

import numpy as np

from tests.native.corpus.case import Array, Case, rng


def _ints(name: str, count: int, limit: int = 1 << 30) -> Array:
    return rng(name).integers(0, limit, count).astype(np.int32)


def _collatz(a: Array) -> Array:
    result = []
    for value in a:
        n, steps = int(value) % 10000 + 1, 0
        while n != 1:
            n = 3 * n + 1 if n & 1 else n >> 1
            steps += 1
        result.append(steps)
    return np.array(result, np.int32)


def _fibonacci(a: Array) -> Array:
    series = [0, 1]
    while len(series) < 20:
        series.append(series[-1] + series[-2])
    return np.array([series[int(v) % 12] for v in a], np.int32)


def _gcd(a: Array, b: Array) -> Array:
    return np.gcd(a, b).astype(np.int32)


def cases() -> list[Case]:
    head = 'extern "C" __global__ void k(const int* in, int* out) { const int i = blockIdx.x * blockDim.x + threadIdx.x; const int v = in[i]; '
    return [
        Case(
            "collatz", head + "int n = v % 10000 + 1, s = 0; while (n != 1) { n = n & 1 ? 3 * n + 1 : n >> 1; ++s; } out[i] = s; }",
            [_ints("collatz", 1024)], [("int32", 1024)], grid=(4, 1, 1), reference=_collatz,
        ),
        Case(
            "gcd", """extern "C" __global__ void k(const int* a, const int* b, int* out) { int x = a[threadIdx.x], y = b[threadIdx.x];
    while (y) { const int t = x % y; x = y; y = t; } out[threadIdx.x] = x; }""",
            [_ints("gcda", 256), _ints("gcdb", 256)], [("int32", 256)], reference=_gcd,
        ),
        Case(
            "switch", head + """int r = 0; for (int j = 0; j < 8; ++j) switch ((v >> j) & 7) { case 0: r += 5; break; case 1: r ^= 77; break;
    case 2: r *= 3; case 3: r -= j; break; case 4: r += v; break; case 5: continue; case 6: r = ~r; break; default: r += 1; } out[i] = r; }""",
            [_ints("switch", 1024)], [("int32", 1024)], grid=(4, 1, 1),
        ),
        Case(
            "indexed_branch", head + """int r; asm volatile("{ .reg .u32 n; and.b32 n, %1, 3; T: .branchtargets A, B, C, D; brx.idx n, T;"
    "A: mov.u32 %0, 11; bra E; B: add.s32 %0, %1, 1; bra E; C: mul.lo.s32 %0, %1, 3; bra E; D: mov.u32 %0, 44; E: }" : "=r"(r) : "r"(v)); out[i] = r; }""",
            [_ints("brx", 256)], [("int32", 256)],
            reference=lambda a: np.choose(a & 3, [np.full_like(a, 11), a + 1, a * 3, np.full_like(a, 44)]).astype(np.int32),
        ),
        Case(
            "calls", """struct P { double x; int y[3]; };
__device__ __noinline__ P change(P p, int n) { p.x += n; p.y[n % 3] *= 2; return p; }
__device__ __noinline__ int weigh(const P& p) { return (int)p.x + p.y[0] * 3 + p.y[1] * 5 + p.y[2] * 7; }
""" + head + "P p{v * 0.5, {v & 7, v & 15, v & 31}}; if (v & 1) p = change(p, v & 255); p = change(p, i & 3); out[i] = weigh(p); }",
            [_ints("calls", 256, 1 << 20)], [("int32", 256)],
        ),
        Case(
            "recursion", "__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }\n" + head + "out[i] = fib(v % 12); }",
            [_ints("recursion", 128)], [("int32", 128)], block=(128, 1, 1), reference=_fibonacci,
        ),
        Case(
            "function_pointers", """typedef int (*F)(int, int);
__device__ __noinline__ int f0(int a, int b) { return a + b; } __device__ __noinline__ int f1(int a, int b) { return a * 3 - b; } __device__ __noinline__ int f2(int a, int b) { return a ^ b; }
__device__ F table[3] = {f0, f1, f2};
""" + head + "out[i] = table[v % 3](v, i) + table[i % 3](i, v & 1023); }",
            [_ints("pointers", 256)], [("int32", 256)],
        ),
        Case(
            "virtual_functions", """struct Shape { int n; __device__ Shape(int n) : n(n) {} __device__ virtual int area() const = 0; };
struct Square : Shape { __device__ Square(int n) : Shape(n) {} __device__ int area() const override { return n * n; } };
struct Strip : Shape { __device__ Strip(int n) : Shape(n) {} __device__ int area() const override { return n * 3 + 1; } };
""" + head + "Square a(v & 255); Strip b(v & 511); const Shape* s = v & 1024 ? (const Shape*)&a : &b; out[i] = s->area(); }",
            [_ints("virtual", 256)], [("int32", 256)],
        ),
        Case(
            "early_exit", head + "if (v & 1) return; __shared__ int s[256]; s[threadIdx.x] = v; __syncthreads(); if ((v & 6) == 6) { out[i] = -1; return; } out[i] = s[threadIdx.x] >> 1; }",
            [_ints("early", 256)], [("int32", 256)],
        ),
        Case(
            "special_registers", """extern "C" __global__ void k(unsigned* out) {
    const unsigned b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned lane, eq, lt, le, gt, ge, dynamic; asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm("mov.u32 %0, %%lanemask_eq;" : "=r"(eq));
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lt)); asm("mov.u32 %0, %%lanemask_le;" : "=r"(le)); asm("mov.u32 %0, %%lanemask_gt;" : "=r"(gt));
    asm("mov.u32 %0, %%lanemask_ge;" : "=r"(ge)); asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic));
    out[b * 60 + t] = lane + eq * 3 + lt * 5 + le * 7 + gt * 11 + ge * 13 + dynamic * 17 + blockIdx.x * 19 + blockIdx.y * 23 + blockIdx.z * 29 + threadIdx.x * 31 + threadIdx.y * 37 + threadIdx.z * 41 + warpSize; }""",
            [], [("uint32", 24 * 60)], grid=(2, 3, 4), block=(5, 4, 3), shared=512,
        ),
        Case(
            "clocks", """extern "C" __global__ void k(int* out) { const long long a = clock64(); unsigned long long t, u; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    __nanosleep(20000); asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(u)); const long long b = clock64(); out[threadIdx.x] = (b > a) + (u >= t) * 2; }""",
            [], [("int32", 32)], block=(32, 1, 1), reference=lambda: np.full(32, 3, np.int32),
        ),
        Case(
            "predicates", head + """int r; asm("{.reg .pred p, q, s; setp.ne.s32 s, %1, 7; setp.lt.and.s32 p|q, %1, %2, s; setp.gt.or.s32 s, %1, 100, !p; xor.pred p, p, s; not.pred q, q; @p mov.u32 %0, 1; @!p mov.u32 %0, 2;"
    "@q add.s32 %0, %0, 10; and.pred s, s, q; selp.b32 %0, %0, 99, s;}" : "=&r"(r) : "r"(v), "r"(i * 4000000)); out[i] = r; }""",
            [_ints("predicates", 256)], [("int32", 256)],
        ),
        Case(
            "mandelbrot", """extern "C" __global__ void k(int* out) { const int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    const float cr = x * 0.046875f - 2.0f, ci = y * 0.046875f - 1.5f; float zr = 0, zi = 0; int n = 0;
    while (n < 200 && zr * zr + zi * zi < 4.0f) { const float t = zr * zr - zi * zi + cr; zi = 2.0f * zr * zi + ci; zr = t; ++n; } out[y * 64 + x] = n; }""",
            [], [("int32", 4096)], grid=(4, 4, 1), block=(16, 16, 1),
        ),
    ]  # fmt: skip
