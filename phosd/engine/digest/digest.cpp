// The chunk digest on the CPU: the same function as digest.cu, over 256 lanes in turn.
#include "digest.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phos::digest {
namespace {

using Lanes = std::array<uint64_t[kPasses], kLanes>;

// Reduces one piece (kPieceBytes, 32 lanes) and folds it into those lanes.
using Piece = void (*)(const Key&, const std::byte*, uint64_t (*)[kPasses]);

void piece_portable(const Key& key, const std::byte* data, uint64_t (*lanes)[kPasses]) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        uint64_t nh[kPasses] = {};
        for (unsigned v = 0; v < kVectors; ++v) {
            uint32_t w[4];
            std::memcpy(w, data + size_t{v} * kRowBytes + size_t{lane} * kVectorBytes, sizeof w);
            for (unsigned p = 0; p < kPasses; ++p) {
                const uint32_t* k = key.nh + size_t{4} * v + size_t{2} * p;
                nh[p] += static_cast<uint64_t>(w[0] + k[0]) * (w[1] + k[1]);
                nh[p] += static_cast<uint64_t>(w[2] + k[2]) * (w[3] + k[3]);
            }
        }
        for (unsigned p = 0; p < kPasses; ++p)
            lanes[lane][p] = fold(lanes[lane][p], key.fold[p], nh[p]);
    }
}

#if defined(__x86_64__)
// Two lanes in one 256-bit register, as four 64-bit words of two factors each.
__attribute__((target("avx2"))) void piece_avx2(const Key& key, const std::byte* data,
                                                uint64_t (*lanes)[kPasses]) {
    __m256i keys[kVectors][kPasses];
    for (unsigned v = 0; v < kVectors; ++v)
        for (unsigned p = 0; p < kPasses; ++p)
            keys[v][p] = _mm256_broadcastsi128_si256(_mm_loadu_si128(
                reinterpret_cast<const __m128i*>(key.nh + size_t{4} * v + size_t{2} * p)));
    for (unsigned lane = 0; lane < kWarp; lane += 2) {
        __m256i nh[kPasses] = {};
        for (unsigned v = 0; v < kVectors; ++v) {
            const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
                data + size_t{v} * kRowBytes + size_t{lane} * kVectorBytes));
            for (unsigned p = 0; p < kPasses; ++p) {
                const __m256i sums = _mm256_add_epi32(words, keys[v][p]);
                nh[p] =
                    _mm256_add_epi64(nh[p], _mm256_mul_epu32(sums, _mm256_srli_epi64(sums, 32)));
            }
        }
        for (unsigned p = 0; p < kPasses; ++p) {
            alignas(32) uint64_t word[4];
            _mm256_store_si256(reinterpret_cast<__m256i*>(word), nh[p]);
            lanes[lane][p] = fold(lanes[lane][p], key.fold[p], word[0] + word[1]);
            lanes[lane + 1][p] = fold(lanes[lane + 1][p], key.fold[p], word[2] + word[3]);
        }
    }
}
#endif

Piece fastest_piece() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return piece_avx2;
#endif
    return piece_portable;
}

void digest_chunk(const Key& key, const Chunk& chunk, Piece piece, uint64_t digest[2]) {
    const auto* data = reinterpret_cast<const std::byte*>(chunk.address);
    Lanes lanes{};
    for (uint64_t at = 0; at < chunk.length; at += kRoundBytes) {
        for (unsigned first = 0; first < kLanes; first += kWarp) {
            const uint64_t start = at + uint64_t{first / kWarp} * kPieceBytes;
            if (start + kPieceBytes <= chunk.length) {
                piece(key, data + start, &lanes[first]);
            } else {
                std::byte padded[kPieceBytes] = {};
                if (start < chunk.length) std::memcpy(padded, data + start, chunk.length - start);
                piece(key, padded, &lanes[first]);
            }
        }
    }
    for (unsigned level = 0; level < kLevels; ++level) {
        const unsigned half = kLanes >> (level + 1);
        for (unsigned lane = 0; lane < half; ++lane)
            for (unsigned p = 0; p < kPasses; ++p)
                lanes[lane][p] = fold(lanes[lane][p], key.tree[level][p], lanes[lane + half][p]);
    }
    finish(key, lanes[0], chunk.length, digest);
}

}  // namespace
}  // namespace phos::digest

#define PHOS_EXPORT extern "C" __attribute__((visibility("default")))

// Hashes `count` chunks of host memory; `digests` receives 16 bytes a chunk. Thread-safe.
// `portable` avoids the vector units: the tests hold both paths against each other.
PHOS_EXPORT void phos_digest_chunks(const phos::digest::Key* key, const phos::digest::Chunk* chunks,
                                    size_t count, uint64_t (*digests)[2], int portable) {
    using namespace phos::digest;
    const Piece piece = portable ? piece_portable : fastest_piece();
    for (size_t i = 0; i < count; ++i) digest_chunk(*key, chunks[i], piece, digests[i]);
}

PHOS_EXPORT size_t phos_digest_key_bytes() {
    return sizeof(phos::digest::Key);
}
