#include "control/hello.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/driver.h"
#include "base/process.h"
#include "gate/gate.h"
#include "intercept/unsupported.h"
#include "park/park.h"

namespace phos {
namespace {

std::vector<wire::DeviceId> visible_devices() {
    std::vector<wire::DeviceId> devices;
    int count = 0;
    CUuuid uuid;
    if (!driver.cuDeviceGetUuid_v2 || driver.cuDeviceGetCount(&count) != CUDA_SUCCESS) return {};
    for (int device = 0; device < count; ++device) {
        if (driver.cuDeviceGetUuid_v2(&uuid, device) != CUDA_SUCCESS) break;
        std::memcpy(devices.emplace_back().uuid, uuid.bytes, sizeof uuid.bytes);
    }
    return devices;
}

// The ids of the GPUs that the process saw when it began, since a restore may put others in their
// place.
std::vector<wire::DeviceId>& first_devices() {
    static auto& devices = *new std::vector<wire::DeviceId>;
    return devices;
}

bool same(const wire::DeviceId& one, const wire::DeviceId& other) {
    return std::memcmp(one.uuid, other.uuid, sizeof one.uuid) == 0;
}

// The driver looks an import up among the first ones.
bool makes_memory(const std::vector<wire::DeviceId>& devices) {
    return !std::all_of(devices.begin(), devices.end(), [](const wire::DeviceId& device) {
        return std::any_of(first_devices().begin(), first_devices().end(),
                           [&](const wire::DeviceId& first) { return same(device, first); });
    });
}

void put_reason(wire::Hello& hello, const Fitness& fit) {
    std::snprintf(hello.reason, sizeof hello.reason, "%s", fit.reason.c_str());
    const size_t end = fit.reason.size() + 1, size = std::strlen(fit.code) + 1;
    if (end + size <= sizeof hello.reason) std::memcpy(hello.reason + end, fit.code, size);
}

}  // namespace

void note_first_devices() {
    first_devices() = visible_devices();
}

HelloReply make_hello(bool never_stopped) {
    HelloReply said{{}, visible_devices()};
    wire::Hello& hello = said.hello;
    note_libraries();
    const Fitness fit = fitness();
    int version = 0;
    if (driver.cuDriverGetVersion) driver.cuDriverGetVersion(&version);
    hello.pid = static_cast<uint32_t>(getpid());
    hello.driver_version = static_cast<uint32_t>(version);
    hello.devices = static_cast<uint32_t>(said.devices.size());
    hello.state = static_cast<uint32_t>(gate::state());
    hello.parkable = fit.parkable;
    hello.ever_parked = (park::ever_parked() ? wire::kImports : 0u) |
                        (makes_memory(said.devices) ? wire::kMakes : 0u);
    hello.uses_unsupported = fit.unsupported;
    hello.never_stopped = never_stopped;
    put_reason(hello, fit);
    return said;
}

}  // namespace phos
