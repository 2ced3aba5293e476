// Kernels that reach what they write in many ways. Each changes words of 64 bits, `stride` apart,
// so that every bit of a word depends on all that was written there before. Integers only.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Cells {
    u64* words;
    u32 count;
    u32 stride;
};
struct Two {
    u32 ignored;
    Cells first;
    Cells second;
};
struct __attribute__((packed)) Packed {
    u32 count;
    u64* words;  // at offset 4: no aligned word of the parameter holds it
    u32 stride;
};
struct __align__(64) Opaque {  // as long as a tensor map, and aligned as one
    u64 parts[16];
};

__device__ u64* target;  // set by the host
__constant__ u64* constant_target;

__device__ __forceinline__ u32 place() {
    return blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ void change(u64* word, u64 seed) {
    const u64 mixed = (*word ^ seed) * 0x9E3779B97F4A7C15ull;
    *word = (mixed ^ (mixed >> 29)) + seed;
}

__device__ __forceinline__ void change_cells(u64* words, u32 count, u32 stride, u64 seed) {
    const u32 i = place();
    if (i < count) change(words + (u64)i * stride, seed + i);
}

// Adds what the words are worth, and where they stand, to *total; it writes nothing else.
extern "C" __global__ void sum(const u64* words, u32 count, u32 stride, u64* total) {
    const u32 i = place();
    if (i < count) atomicAdd(total, (words[(u64)i * stride] ^ (i + 1)) * 0xC2B2AE3D27D4EB4Full);
}

extern "C" __global__ void touch(u64* words, u32 count, u32 stride, u64 seed) {
    change_cells(words, count, stride, seed);
}

// Every thread works on 16 words; `from` is only read.
extern "C" __global__ void blend(u64* words, const u64* from, u32 count, u64 seed) {
    for (u32 i = place(); i < count; i += gridDim.x * blockDim.x) {
        words[i] += from[i];
        change(words + i, seed + i);
    }
}

extern "C" __global__ void scatter(u64* words, const u32* at, u32 count, u32 size, u64 seed) {
    const u32 i = place();
    if (i < count) atomicAdd(words + (at[i] ^ (u32)seed) % size, seed | 1);
}

extern "C" __global__ void by_value(Cells cells, u64 seed) {
    change_cells(cells.words, cells.count, cells.stride, seed);
}

extern "C" __global__ void two_by_value(Two both, u64 seed) {
    change_cells(both.first.words, both.first.count, both.first.stride, seed);
    change_cells(both.second.words, both.second.count, both.second.stride, ~seed);
}

// The first three are addresses that the kernel does not use.
extern "C" __global__ void with_stale(const u64* freed, u64 number, const u64* idle, u64* words,
                                      u32 count, u32 stride, u64 seed) {
    change_cells(words, count, stride, seed);
}

extern "C" __global__ void mapped(Opaque map, u32 count, u32 stride, u64 seed) {
    change_cells(reinterpret_cast<u64*>(map.parts[0]), count, stride, seed);
}

// --- nothing in the parameters of these tells what they write

extern "C" __global__ void chase(u64* const* table, u32 blocks, u32 first, u32 count, u32 stride,
                                 u64 seed) {
    const u32 i = place();
    if (i < blocks * count) change(table[i / count] + first + (u64)(i % count) * stride, seed + i);
}

struct Link {
    const Link* next;
    u64* words;
};
extern "C" __global__ void follow(const Link* link, u32 first, u32 count, u32 stride, u64 seed) {
    for (; link; link = link->next, ++seed) change_cells(link->words + first, count, stride, seed);
}

// Writes at `reach` words after `words`, which may lie in a neighbour.
extern "C" __global__ void overrun(u64* words, u64 reach, u32 count, u32 stride, u64 seed) {
    change_cells(words + reach, count, stride, seed);
}

extern "C" __global__ void masked(u64 address, u32 count, u32 stride, u64 seed) {
    change_cells(reinterpret_cast<u64*>(~address), count, stride, seed);
}

extern "C" __global__ void opaque(Opaque hidden, u32 count, u32 stride, u64 seed) {
    const u64 address = hidden.parts[5] ^ hidden.parts[11];
    change_cells(reinterpret_cast<u64*>(address), count, stride, seed);
}

extern "C" __global__ void packed(Packed cells, u64 seed) {
    change_cells(cells.words, cells.count, cells.stride, seed);
}

extern "C" __global__ void halves(u32 low, u32 count, u32 high, u32 stride, u64 seed) {
    change_cells(reinterpret_cast<u64*>((u64)high << 32 | low), count, stride, seed);
}

extern "C" __global__ void through_global(u32 first, u32 count, u32 stride, u64 seed) {
    change_cells(target + first, count, stride, seed);
}

extern "C" __global__ void through_constant(u32 first, u32 count, u32 stride, u64 seed) {
    change_cells(constant_target + first, count, stride, seed);
}

extern "C" __global__ void mapped_elsewhere(const Opaque* map, u32 first, u32 count, u32 stride,
                                            u64 seed) {
    change_cells(reinterpret_cast<u64*>(map->parts[0]) + first, count, stride, seed);
}
