// cuPointerGetAttribute: what the driver knows of an address.
#include "api/api.h"

using namespace phos::softgpu;

namespace {

struct Pointer {
    uint64_t address;
    Allocation allocation;
    PoolPtr pool;
    Mapping mapping;
    HostRange host;
    bool heap = false;

    explicit Pointer(uint64_t at) : address(at) {
        heap = runtime().heap_of(at, &allocation, &pool) != nullptr;
        mapping = runtime().space().find(at);
        host = runtime().host.find(at);
        // What lies in a segment of a heap, but in no allocation, is nobody's.
        if (!heap && mapping.memory && mapping.memory->descriptor() < 0) mapping = {};
    }
    bool known() const { return mapping.memory || host.size; }
    bool device() const { return mapping.memory != nullptr; }
    bool managed() const {
        return (pool && pool->kind.managed()) ||
               (host.size && host.kind == HostRange::Kind::managed);
    }
    bool in_host() const { return device() ? mapping.memory->device < 0 : host.size > 0; }
    int ordinal() const {
        if (host.context) return host.context->device;
        return in_host() ? current()->device : mapping.memory->device;
    }
    uint64_t start() const {
        return heap ? allocation.address : device() ? mapping.address : host.address;
    }
    size_t size() const { return heap ? allocation.size : device() ? mapping.size : host.size; }
    uint64_t id() const {
        return heap ? allocation.id : device() ? mapping.id | 1ull << 32 : host.id;
    }
};

template <typename T>
void put(void* data, T value) {
    std::memcpy(data, &value, sizeof value);
}

// False: the attribute means nothing for this pointer.
bool get(void* data, CUpointer_attribute attribute, const Pointer& pointer) {
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: {
            const void* context = nullptr;  // of a pool's memory, and of VMM's
            if (pointer.host.size)
                context = pointer.host.context.get();
            else if (pointer.heap && !pointer.pool)
                context = pointer.allocation.owner;
            if (!pointer.known()) return false;
            put(data, context);
            return true;
        }
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            if (!pointer.known()) return false;
            put<unsigned>(data, pointer.in_host() && !pointer.managed() ? CU_MEMORYTYPE_HOST
                                                                        : CU_MEMORYTYPE_DEVICE);
            return true;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            if (!pointer.known() || (pointer.mapping.host && !pointer.mapping.access)) return false;
            put<CUdeviceptr>(data, pointer.address);
            return true;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            if (!pointer.host.size && !pointer.mapping.host) return false;
            put(data, reinterpret_cast<void*>(pointer.address));
            return true;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
            put<int>(data, 0);
            return pointer.known();
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            if (!pointer.known()) return false;
            put<unsigned long long>(data, pointer.id());
            return true;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            if (!pointer.known()) return false;
            put<int>(data, pointer.managed());
            return true;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            if (!pointer.known()) return false;
            put<int>(data, pointer.ordinal());
            return true;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            if (!pointer.known()) return false;
            put<CUdeviceptr>(data, pointer.start());
            return true;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            if (!pointer.known()) return false;
            put<size_t>(data, pointer.size());
            return true;
        case CU_POINTER_ATTRIBUTE_MAPPED:
            put<int>(data, pointer.known());
            return true;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
            put<int>(data, 0);
            return true;
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
            put<unsigned long long>(data,
                                    pointer.device() && !pointer.heap
                                        ? pointer.mapping.memory->properties.requestedHandleTypes
                                        : 0);
            return true;
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
            put<void*>(data, pointer.pool.get());
            return true;
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: {
            if (!pointer.known()) return false;
            const auto device = static_cast<unsigned>(current()->device);
            const bool host = pointer.host.size || pointer.mapping.host;
            const bool read = host || pointer.mapping.access >> device & 1;
            const bool write = host || pointer.mapping.access >> (device + 4) & 1;
            put<unsigned long long>(data, write  ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                                          : read ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ
                                                 : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE);
            return true;
        }
        case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
            if (!pointer.known()) return false;
            put<size_t>(data, pointer.device() ? pointer.mapping.size : pointer.host.size);
            return true;
        case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
            if (!pointer.known()) return false;
            put<CUdeviceptr>(data,
                             pointer.device() ? pointer.mapping.address : pointer.host.address);
            return true;
        case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
            if (!pointer.known()) return false;
            put<unsigned long long>(
                data, pointer.device() ? pointer.mapping.memory->id : pointer.host.id);
            return true;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

// How much cuPointerGetAttributes clears where an attribute means nothing.
size_t size_of(CUpointer_attribute attribute) {
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return 4;
        default:
            return 8;
    }
}

}  // namespace

API(cuPointerGetAttribute, (void* data, CUpointer_attribute attribute, CUdeviceptr address),
    (data, attribute, address)) {
    require(data != nullptr);
    current();
    require(get(data, attribute, Pointer(address)));
}

API(cuPointerGetAttributes,
    (unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr address),
    (count, attributes, data, address)) {
    require(count > 0 && attributes != nullptr && data != nullptr);
    current();
    const Pointer pointer(address);
    for (unsigned i = 0; i < count; ++i) {
        require(data[i] != nullptr);
        if (get(data[i], attributes[i], pointer)) continue;
        std::memset(data[i], 0, size_of(attributes[i]));
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) put<int>(data[i], -2);
    }
}

API(cuPointerSetAttribute, (const void* value, CUpointer_attribute attribute, CUdeviceptr address),
    (value, attribute, address)) {
    // Synchronous memory operations always are: the one attribute that can be set changes nothing.
    require(value != nullptr && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
    require(Pointer(address).known());
}
