// What the environment says about the software GPU; read once, at cuInit.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

namespace phos::softgpu {

struct Config {
    unsigned gpus = 1;              // PHOS_SOFTGPU_DEVICES: how many the machine has, 1 to 4
    std::vector<unsigned> visible;  // which of them this process sees: CUDA_VISIBLE_DEVICES
    std::string machine;            // PHOS_SOFTGPU_MACHINE: whose GPUs they are
    std::string chip = "PHOS software GPU";  // PHOS_SOFTGPU_CHIP: what the GPUs call themselves
    uint64_t memory = 2ull << 30;            // PHOS_SOFTGPU_MEMORY: bytes a GPU
    double copy_rate = 0;    // PHOS_SOFTGPU_COPY_RATE: bytes a second; 0 is as fast as it goes
    std::string slow_while;  // PHOS_SOFTGPU_COPY_RATE_WHILE: a file; the rate holds while it exists
    double latency = 0;      // PHOS_SOFTGPU_LATENCY: seconds before each operation
    bool peers = true;       // PHOS_SOFTGPU_PEERS: whether a GPU reaches the memory of another
    std::string trace;       // PHOS_SOFTGPU_TRACE: file for the access trace, or empty
    std::string device_file;  // PHOS_SOFTGPU_DEVICE_FILE: open and mapped as a driver's, or empty
    std::string folder;       // PHOS_SOFTGPU_DIR: where memory is accounted

    // The UUIDs of the machine's GPUs.
    std::vector<CUuuid> gpu_uuids() const;

    // Throws CUDA_ERROR_INVALID_VALUE for a setting that means nothing, and says which on stderr.
    static Config from_environment();
};

}  // namespace phos::softgpu
