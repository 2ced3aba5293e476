// The chunk digest on the GPU: one thread block a chunk, every thread one lane of digest.h.
// `make_ptx.py` compiles this to digest.ptx, which the data mover loads.
#include "digest.h"

using namespace phos::digest;

namespace {

// One round of one lane. `Whole` rounds need no bounds; the last one of an odd length does.
template <bool Whole>
__device__ __forceinline__ void round(const Key& key, const char* piece, uint64_t left,
                                      uint64_t state[kPasses]) {
    const unsigned lane = threadIdx.x % kWarp * kVectorBytes;
    uint4 vectors[kVectors];
#pragma unroll
    for (unsigned v = 0; v < kVectors; ++v) {
        const unsigned offset = v * kRowBytes + lane;
        vectors[v] = make_uint4(0, 0, 0, 0);
        if (Whole || offset < left)
            vectors[v] = __ldcs(reinterpret_cast<const uint4*>(piece + offset));
    }
#pragma unroll
    for (unsigned p = 0; p < kPasses; ++p) {
        uint64_t nh = 0;
#pragma unroll
        for (unsigned v = 0; v < kVectors; ++v) {
            const uint32_t* k = key.nh + 4 * v + 2 * p;
            nh += static_cast<uint64_t>(vectors[v].x + k[0]) * (vectors[v].y + k[1]);
            nh += static_cast<uint64_t>(vectors[v].z + k[2]) * (vectors[v].w + k[3]);
        }
        state[p] = fold(state[p], key.fold[p], nh);
    }
}

}  // namespace

// grid: one block a chunk; block: kLanes threads. `digests` receives 16 bytes a chunk.
// The key is a parameter by value: its words are then operands in constant memory.
extern "C" __global__ void __launch_bounds__(kLanes, 4)
    phos_digest(const __grid_constant__ Key key, const Chunk* __restrict__ chunks,
                ulonglong2* __restrict__ digests) {
    __shared__ uint64_t lanes[kPasses][kLanes];
    const unsigned lane = threadIdx.x;
    const Chunk chunk = chunks[blockIdx.x];
    const char* data = reinterpret_cast<const char*>(chunk.address);
    uint64_t state[kPasses] = {};
    uint64_t at = 0;
    const uint64_t piece = lane / kWarp * kPieceBytes;
    for (; at + kRoundBytes <= chunk.length; at += kRoundBytes)
        round<true>(key, data + at + piece, 0, state);
    if (at < chunk.length) {
        const uint64_t start = at + piece;
        round<false>(key, data + start, start < chunk.length ? chunk.length - start : 0, state);
    }
    for (unsigned p = 0; p < kPasses; ++p) lanes[p][lane] = state[p];
    for (unsigned level = 0; level < kLevels; ++level) {
        const unsigned half = kLanes >> (level + 1);
        __syncthreads();
        if (lane < half)
            for (unsigned p = 0; p < kPasses; ++p)
                lanes[p][lane] = fold(lanes[p][lane], key.tree[level][p], lanes[p][lane + half]);
    }
    if (lane == 0) {
        uint64_t h[kPasses], digest[2];
        for (unsigned p = 0; p < kPasses; ++p) h[p] = lanes[p][0];
        finish(key, h, chunk.length, digest);
        digests[blockIdx.x] = make_ulonglong2(digest[0], digest[1]);
    }
}
