// The names by which a software GPU is known: stable, so that an image finds its device again.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace phos::softgpu {

constexpr unsigned kMaxGpus = 4;

// `machine` is the name of the machine; GPUs of another one have other UUIDs.
inline CUuuid gpu_uuid(const std::string& machine, unsigned gpu) {
    CUuuid uuid;
    std::memcpy(uuid.bytes, "phos-software-g", 15);
    if (!machine.empty()) {
        uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
        for (const char c : machine) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
        std::memcpy(uuid.bytes + 5, &hash, sizeof hash);
    }
    uuid.bytes[15] = static_cast<char>(gpu);
    return uuid;
}

inline bool same(const CUuuid& one, const CUuuid& other) {
    return std::memcmp(one.bytes, other.bytes, sizeof one.bytes) == 0;
}

// As nvidia-smi and CUDA_VISIBLE_DEVICES write it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx.
inline std::string gpu_name(const CUuuid& uuid) {
    std::string name = "GPU";
    for (int i = 0; i < 16; ++i) {
        if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) name += '-';
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<uint8_t>(uuid.bytes[i]));
        name += digits;
    }
    return name;
}

}  // namespace phos::softgpu
