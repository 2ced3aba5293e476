// The process's software GPU: made by cuInit, never destroyed, since streams run until the end.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/config.h"
#include "core/context.h"
#include "core/device.h"
#include "core/device_file.h"
#include "core/event.h"
#include "core/gate.h"
#include "core/graph.h"
#include "core/handles.h"
#include "core/module.h"
#include "core/pool.h"
#include "core/space.h"

namespace phos::softgpu {

// What a thread keeps: its context stack, its default streams, its capture mode.
struct ThreadState {
    std::vector<ContextPtr> stack;
    struct DefaultStream {
        ContextPtr context;  // stays as long as its stream is known here
        StreamPtr stream;
    };
    std::map<const Context*, DefaultStream> default_streams;
    CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    bool in_callback = false;
    uint64_t stream = 0;  // whose work this thread runs (cuStreamGetId)
    ~ThreadState();
};
ThreadState& this_thread();

// A host function runs: it must not call the driver.
class InCallback {
  public:
    InCallback() { this_thread().in_callback = true; }
    ~InCallback() { this_thread().in_callback = false; }
};

// Handles of physical memory are numbers with a count (cuMemRetainAllocationHandle).
class MemoryHandles {
  public:
    CUmemGenericAllocationHandle add(std::shared_ptr<Memory> memory);
    CUmemGenericAllocationHandle retain(const std::shared_ptr<Memory>& memory);
    std::shared_ptr<Memory> get(CUmemGenericAllocationHandle handle) const;
    void release(CUmemGenericAllocationHandle handle);
    std::vector<std::shared_ptr<Memory>> all() const;

  private:
    struct Entry {
        std::shared_ptr<Memory> memory;
        unsigned count;
    };
    mutable std::mutex mutex_;
    std::unordered_map<CUmemGenericAllocationHandle, Entry> entries_;
};

// Host memory that the driver knows: pinned, registered or managed.
struct HostRange {
    uint64_t address = 0;
    size_t size = 0;
    enum class Kind { pinned, registered, managed } kind = Kind::pinned;
    unsigned flags = 0;
    uint64_t id = 0;
    ContextPtr context;
};

// Memory of the host that the devices reach; whole pages.
uint64_t allocate_host(size_t size, HostRange::Kind kind, unsigned flags,
                       const ContextPtr& context);
// Ends what made the range known to the devices, and frees it when it is the driver's.
void release_host(const HostRange& range);

class HostRanges {
  public:
    void add(HostRange range);  // throws CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    HostRange remove(uint64_t address, std::initializer_list<HostRange::Kind> kinds,
                     CUresult otherwise);
    HostRange find(uint64_t address) const;  // size 0: none
    bool any(HostRange::Kind kind) const;
    std::vector<HostRange> remove_all_of(const Context* context);

  private:
    mutable std::mutex mutex_;
    std::map<uint64_t, HostRange> ranges_;
};

class Runtime {
  public:
    explicit Runtime(Config config);

    const Config& config() const { return config_; }
    Gate& gate() { return gate_; }
    DeviceFile& device_file() { return device_file_; }
    DeviceFile& file_of_nvml() { return file_of_nvml_; }
    Space& space() { return space_; }
    void add_devices();
    int device_count() const { return static_cast<int>(devices_.size()); }
    Device& device(int ordinal);
    int ordinal_of(const std::string& gpu) const;  // -1: not visible
    // Throws what an import of memory of this device answers. As the driver, the process finds only
    // the GPUs that it saw when it began, also where a restore has put others in their place.
    void require_importable(int ordinal);

    MemoryHandles memory;
    HostRanges host;
    Handles<CUcontext, Context> contexts;
    Handles<CUstream, Stream> streams;
    Handles<CUevent, Event> events;
    Pools pools;
    Handles<CUmodule, Module> modules;
    Handles<CUfunction, Function> functions;
    Handles<CUlibrary, Library> libraries;
    Handles<CUkernel, LibraryKernel> kernels;
    Handles<CUgraph, Graph> graphs;
    Handles<CUgraphNode, Node> nodes;
    Handles<CUgraphExec, GraphExec> graph_execs;
    Handles<CUuserObject, UserObject> user_objects;

    std::mutex peers_mutex;
    std::array<std::array<bool, kMaxGpus>, kMaxGpus> peers{};  // [who][whose memory]

    void remove_module(const ModulePtr& module);
    // Ends a context and frees everything in it.
    void destroy(const ContextPtr& context);
    // Waits for all work of every context on the device.
    void wait_for_device(int ordinal);
    // Like Heap::allocate; when the device is full, waits for frees under way and for what pools
    // keep for later before it gives up.
    uint64_t allocate(Heap& heap, int ordinal, size_t size, const Context* owner);
    // The heap that holds an address (a device's or a pool's), or null.
    Heap* heap_of(uint64_t address, Allocation* allocation, PoolPtr* pool = nullptr);

  private:
    const Config config_;
    Gate gate_;
    DeviceFile device_file_{true};
    DeviceFile file_of_nvml_{false};
    Space space_;
    std::deque<Device> devices_;
};

// cuInit's part. Throws what cuInit answers.
void initialize();
// NVML's: the driver's checkpoint knows the process from then on, though CUDA is not initialized.
Runtime& runtime_for_nvml();
bool initialized();
bool forked();  // this is a child of the process that called cuInit: CUDA is not usable
Runtime& runtime();

// The calling thread's context; throws CUDA_ERROR_INVALID_CONTEXT, or its sticky error.
ContextPtr current();
// Like current(), but a broken context is returned as well.
ContextPtr current_even_broken();
// A stream of the program, with 0 standing for the legacy one.
StreamPtr stream_of(CUstream handle);

}  // namespace phos::softgpu
