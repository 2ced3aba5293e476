// Devices and what they say of themselves.
#include <algorithm>
#include <cstdio>
#include <string>

#include "api/api.h"

using namespace phos::softgpu;

namespace {

int attribute(CUdevice_attribute attribute, const Device& device) {
    switch (attribute) {
#define ATTRIBUTE(name, value)       \
    case CU_DEVICE_ATTRIBUTE_##name: \
        return static_cast<int>(value);
#include "api/attributes.def"
#undef ATTRIBUTE
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
            return static_cast<int>(device.gpu()) + 1;
        default:
            // Every attribute that exists and is not listed is a feature that is not there.
            require(attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX);
            return 0;
    }
}

}  // namespace

API(cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal)) {
    require(device != nullptr);
    *device = runtime().device(ordinal).ordinal;
}

API(cuDeviceGetCount, (int* count), (count)) {
    require(count != nullptr);
    *count = runtime().device_count();
}

API(cuDeviceGetName, (char* name, int length, CUdevice device), (name, length, device)) {
    require(name != nullptr && length > 0);
    runtime().device(device);
    std::snprintf(name, static_cast<size_t>(length), "%s", runtime().config().chip.c_str());
}

static void uuid_of(CUuuid* uuid, CUdevice device) {
    require(uuid != nullptr);
    *uuid = runtime().device(device).uuid();
}
API(cuDeviceGetUuid, (CUuuid * uuid, CUdevice device), (uuid, device)) {
    uuid_of(uuid, device);
}
API(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device), (uuid, device)) {
    uuid_of(uuid, device);
}

API(cuDeviceTotalMem_v2, (size_t* bytes, CUdevice device), (bytes, device)) {
    require(bytes != nullptr);
    *bytes = runtime().device(device).registry().total();
}

API(cuDeviceGetAttribute, (int* value, CUdevice_attribute which, CUdevice device),
    (value, which, device)) {
    require(value != nullptr);
    *value = attribute(which, runtime().device(device));
}

API(cuDeviceComputeCapability, (int* major, int* minor, CUdevice device), (major, minor, device)) {
    require(major != nullptr && minor != nullptr);
    *major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, runtime().device(device));
    *minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, runtime().device(device));
}

API(cuDeviceGetProperties, (CUdevprop * properties, CUdevice device), (properties, device)) {
    require(properties != nullptr);
    const Device& of = runtime().device(device);
    const auto get = [&](CUdevice_attribute which) { return attribute(which, of); };
    *properties = {};
    properties->maxThreadsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    for (int axis = 0; axis < 3; ++axis) {
        properties->maxThreadsDim[axis] =
            get(static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + axis));
        properties->maxGridSize[axis] =
            get(static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + axis));
    }
    properties->sharedMemPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
    properties->totalConstantMemory = get(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
    properties->SIMDWidth = get(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
    properties->memPitch = get(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
    properties->regsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
    properties->clockRate = get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
    properties->textureAlign = get(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
}

static std::string pci_id(const Device& device) {
    char text[16];
    std::snprintf(text, sizeof text, "0000:%02x:00.0", device.first_gpu + 1);
    return text;
}

API(cuDeviceGetPCIBusId, (char* text, int length, CUdevice device), (text, length, device)) {
    require(text != nullptr && length > 0);
    std::snprintf(text, static_cast<size_t>(length), "%s",
                  pci_id(runtime().device(device)).c_str());
}

API(cuDeviceGetByPCIBusId, (CUdevice * device, const char* id), (device, id)) {
    require(device != nullptr && id != nullptr);
    std::string wanted = id;
    if (std::count(wanted.begin(), wanted.end(), ':') == 1) wanted = "0000:" + wanted;
    if (wanted.find('.') == std::string::npos) wanted += ".0";
    std::transform(wanted.begin(), wanted.end(), wanted.begin(), ::tolower);
    for (int ordinal = 0; ordinal < runtime().device_count(); ++ordinal)
        if (pci_id(runtime().device(ordinal)) == wanted) {
            *device = ordinal;
            return;
        }
    fail(CUDA_ERROR_INVALID_DEVICE);
}

API(cuDeviceGetExecAffinitySupport, (int* value, CUexecAffinityType type, CUdevice device),
    (value, type, device)) {
    require(value != nullptr && type < CU_EXEC_AFFINITY_TYPE_MAX);
    runtime().device(device);
    *value = 0;
}

API(cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice peer), (can, device, peer)) {
    require(can != nullptr);
    const bool other = &runtime().device(device) != &runtime().device(peer);
    *can = other && runtime().config().peers;
}

API(cuDeviceGetP2PAttribute,
    (int* value, CUdevice_P2PAttribute which, CUdevice device, CUdevice peer),
    (value, which, device, peer)) {
    require(value != nullptr);
    require(&runtime().device(device) != &runtime().device(peer), CUDA_ERROR_INVALID_DEVICE);
    switch (which) {
        case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
        case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
            *value = runtime().config().peers;
            return;
        case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
        case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
            *value = 0;
            return;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

ANYTIME_API(cuProfilerStart, (), ()) {}
ANYTIME_API(cuProfilerStop, (), ()) {}
