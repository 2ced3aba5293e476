// The names by which a software GPU is known: stable, so that an image finds its device again.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace phos::softgpu {

constexpr unsigned kMaxGpus = 4;

inline CUuuid gpu_uuid(unsigned gpu) {
    CUuuid uuid;
    std::memcpy(uuid.bytes, "phos-software-g", 15);
    uuid.bytes[15] = static_cast<char>(gpu);
    return uuid;
}

// Which GPU has this uuid; kMaxGpus when none.
inline unsigned gpu_of(const CUuuid& uuid) {
    unsigned gpu = 0;
    while (gpu < kMaxGpus && std::memcmp(gpu_uuid(gpu).bytes, uuid.bytes, 16) != 0) ++gpu;
    return gpu;
}

// As nvidia-smi and CUDA_VISIBLE_DEVICES write it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx.
inline std::string gpu_name(unsigned gpu) {
    const CUuuid uuid = gpu_uuid(gpu);
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
