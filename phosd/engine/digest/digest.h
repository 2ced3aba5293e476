// The chunk digest's arithmetic, shared by the GPU kernel (digest.cu) and the CPU (digest.cpp).
//
// digest = SipHash-2-4-128(sip key; h[0..3], length), where h is a universal hash of the chunk in
// four independent passes. The chunk is read in rounds of 32 KiB, zero-padded at the end. In each
// round a lane (one of 256) takes eight 16-byte vectors and reduces their 32 words w by NH
// (Black et al., "UMAC", 1999):  nh[p] = sum over i of (w[2i] + k[2i + 2p]) * (w[2i+1] +
// k[2i+1+2p]) with 32-bit sums and 64-bit products. A lane folds its rounds into a polynomial
// modulo 2^61 - 1; a tree of the same step with one multiplier a level joins the lanes.
// engine/digest/__init__.py says what this guarantees.
#pragma once

#ifdef __CUDACC_RTC__
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define PHOS_BOTH __device__ __forceinline__
#else
#include <cstdint>
#define PHOS_BOTH inline
#endif

namespace phos::digest {

// Enumerators, not constants: those would become variables of the PTX module.
enum : unsigned {
    kPasses = 4,
    kLanes = 256,
    kLevels = 8,   // log2(kLanes)
    kVectors = 8,  // 16-byte vectors a lane takes in a round
    kVectorBytes = 16,
    kWarp = 32,  // lanes whose vectors lie next to each other
    kRowBytes = kWarp * kVectorBytes,
    kPieceBytes = kVectors * kRowBytes,  // what 32 lanes read in a round
    kRoundBytes = kPieceBytes * kLanes / kWarp,
    kNhWords = 4 * kVectors + 2 * (kPasses - 1),
};
enum : uint64_t { kPrime = (1ull << 61) - 1 };

// Derived from the store's secret by DigestKey in __init__.py, which packs this layout.
struct Key {
    uint64_t fold[kPasses];
    uint64_t tree[kLevels][kPasses];
    uint64_t sip[2];
    uint32_t nh[kNhWords];
};

// A chunk to hash: device or host address of 16-byte aligned memory, length a multiple of 16.
struct Chunk {
    uint64_t address;
    uint64_t length;
};

PHOS_BOTH uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDACC_RTC__
    return __umul64hi(a, b);
#else
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// state * multiplier + value modulo the prime, for state < 2^62 and multiplier < 2^61.
// The result is below 2^61 + 8, not always the smallest one: the same bits on every machine.
PHOS_BOTH uint64_t fold(uint64_t state, uint64_t multiplier, uint64_t value) {
    const uint64_t low = state * multiplier;
    const uint64_t high = high_product(state, multiplier);
    const uint64_t sum =
        (low & kPrime) + ((high << 3) | (low >> 61)) + (value & kPrime) + (value >> 61);
    return (sum & kPrime) + (sum >> 61);
}

PHOS_BOTH uint64_t canonical(uint64_t state) {
    return state >= kPrime ? state - kPrime : state;
}

struct Sip {
    uint64_t a, b, c, d;
};

PHOS_BOTH uint64_t rotate(uint64_t x, int bits) {
    return (x << bits) | (x >> (64 - bits));
}

PHOS_BOTH void sip_round(Sip& s) {
    s.a += s.b;
    s.c += s.d;
    s.b = rotate(s.b, 13) ^ s.a;
    s.d = rotate(s.d, 16) ^ s.c;
    s.a = rotate(s.a, 32);
    s.c += s.b;
    s.a += s.d;
    s.b = rotate(s.b, 17) ^ s.c;
    s.d = rotate(s.d, 21) ^ s.a;
    s.c = rotate(s.c, 32);
}

PHOS_BOTH void sip_absorb(Sip& s, uint64_t word) {
    s.d ^= word;
    sip_round(s);
    sip_round(s);
    s.a ^= word;
}

PHOS_BOTH uint64_t sip_squeeze(Sip& s) {
    for (int i = 0; i < 4; ++i) sip_round(s);
    return s.a ^ s.b ^ s.c ^ s.d;
}

// SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012) over h and the length.
PHOS_BOTH void finish(const Key& key, const uint64_t h[kPasses], uint64_t length,
                      uint64_t digest[2]) {
    Sip s = {key.sip[0] ^ 0x736f6d6570736575ull, key.sip[1] ^ 0x646f72616e646f6dull ^ 0xee,
             key.sip[0] ^ 0x6c7967656e657261ull, key.sip[1] ^ 0x7465646279746573ull};
    for (unsigned p = 0; p < kPasses; ++p) sip_absorb(s, canonical(h[p]));
    sip_absorb(s, length);
    sip_absorb(s, static_cast<uint64_t>(8 * (kPasses + 1)) << 56);
    s.c ^= 0xee;
    digest[0] = sip_squeeze(s);
    s.b ^= 0xdd;
    digest[1] = sip_squeeze(s);
}

}  // namespace phos::digest
