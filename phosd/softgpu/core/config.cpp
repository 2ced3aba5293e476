#include "core/config.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "core/error.h"
#include "core/identity.h"

namespace phos::softgpu {
namespace {

[[noreturn]] void reject(const char* name, const char* value, const char* wanted) {
    std::fprintf(stderr, "phos software GPU: %s=%s is not %s; correct it or unset it\n", name,
                 value, wanted);
    fail(CUDA_ERROR_INVALID_VALUE);
}

// A non-negative number with an optional K, M, G or T.
double number(const char* name, double otherwise, const char* wanted) {
    const char* text = std::getenv(name);
    if (!text || !*text) return otherwise;
    char* end = nullptr;
    double value = std::strtod(text, &end);
    const std::string units = "KMGT";
    if (const size_t unit = units.find(*end); *end && unit != std::string::npos) {
        value *= static_cast<double>(1ull << (10 * (unit + 1)));
        ++end;
    }
    if (end == text || *end || !(value >= 0) || value > 1e15) reject(name, text, wanted);
    return value;
}

// As the driver does: the list ends at the first entry that names no GPU.
std::vector<unsigned> visible_gpus(const std::vector<CUuuid>& uuids) {
    const auto gpus = static_cast<unsigned>(uuids.size());
    std::vector<unsigned> visible;
    const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (unsigned gpu = 0; gpu < gpus; ++gpu) visible.push_back(gpu);
        return visible;
    }
    std::istringstream list(text);
    for (std::string entry; std::getline(list, entry, ',');) {
        unsigned gpu = 0;
        while (gpu < gpus && entry != std::to_string(gpu) && entry != gpu_name(uuids[gpu])) ++gpu;
        if (gpu == gpus || std::count(visible.begin(), visible.end(), gpu)) break;
        visible.push_back(gpu);
    }
    return visible;
}

}  // namespace

std::vector<CUuuid> Config::gpu_uuids() const {
    std::vector<CUuuid> uuids;
    for (unsigned gpu = 0; gpu < gpus; ++gpu) uuids.push_back(gpu_uuid(machine, gpu));
    return uuids;
}

Config Config::from_environment() {
    Config config;
    const double gpus = number("PHOS_SOFTGPU_DEVICES", 1, "a number from 1 to 4");
    if (gpus < 1 || gpus > 4 || gpus != static_cast<unsigned>(gpus))
        reject("PHOS_SOFTGPU_DEVICES", std::getenv("PHOS_SOFTGPU_DEVICES"), "a number from 1 to 4");
    config.gpus = static_cast<unsigned>(gpus);
    if (const char* machine = std::getenv("PHOS_SOFTGPU_MACHINE")) config.machine = machine;
    if (const char* chip = std::getenv("PHOS_SOFTGPU_CHIP"); chip && *chip) config.chip = chip;
    config.visible = visible_gpus(config.gpu_uuids());
    const double memory = number("PHOS_SOFTGPU_MEMORY", 2.0 * (1ull << 30), "a size such as 512M");
    config.memory = static_cast<uint64_t>(memory) & ~((2ull << 20) - 1);
    if (config.memory == 0 || config.memory > 256ull << 30)
        reject("PHOS_SOFTGPU_MEMORY", std::getenv("PHOS_SOFTGPU_MEMORY"), "from 2M to 256G");
    config.copy_rate = number("PHOS_SOFTGPU_COPY_RATE", 0, "bytes a second, such as 500M");
    if (const char* file = std::getenv("PHOS_SOFTGPU_COPY_RATE_WHILE")) config.slow_while = file;
    const double peers = number("PHOS_SOFTGPU_PEERS", 1, "0 or 1");
    if (peers != 0 && peers != 1)
        reject("PHOS_SOFTGPU_PEERS", std::getenv("PHOS_SOFTGPU_PEERS"), "0 or 1");
    config.peers = peers == 1;
    config.latency = number("PHOS_SOFTGPU_LATENCY", 0, "a number of seconds");
    if (const char* trace = std::getenv("PHOS_SOFTGPU_TRACE")) config.trace = trace;
    if (const char* file = std::getenv("PHOS_SOFTGPU_DEVICE_FILE")) config.device_file = file;
    const char* folder = std::getenv("PHOS_SOFTGPU_DIR");
    config.folder = folder && *folder ? folder : "/dev/shm/phos-softgpu";
    return config;
}

}  // namespace phos::softgpu
