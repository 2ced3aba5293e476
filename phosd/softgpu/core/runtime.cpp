#include "core/runtime.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/control.h"
#include "core/error.h"
#include "core/work.h"

namespace phos::softgpu {
namespace {

std::mutex g_init_mutex;
std::atomic<Runtime*> g_runtime{nullptr};
std::atomic<bool> g_cuda{false};  // cuInit has succeeded
std::atomic<bool> g_forked{false};

void after_fork_in_child() {
    // No thread of the parent lives on here and its locks may be held: touch nothing.
    if (g_cuda.load()) g_forked = true;
    if (!g_forked) g_runtime = nullptr;  // the parent has NVML alone; the child may begin CUDA
    close_control_in_child();
}

}  // namespace

void explain(const std::string& text) {
    const char* where = std::getenv("PHOS_SOFTGPU_LOG");
    if (!where || !*where) return;
    const bool to_stderr = std::string(where) == "stderr";
    std::FILE* file = to_stderr ? stderr : std::fopen(where, "ae");
    if (!file) return;
    std::fprintf(file, "phos software GPU: %s\n", text.c_str());
    if (!to_stderr) std::fclose(file);
}

ThreadState::~ThreadState() {
    for (const auto& [key, of] : default_streams) of.context->remove_stream(of.stream);
}

ThreadState& this_thread() {
    static thread_local ThreadState state;
    return state;
}

// --- memory handles ---------------------------------------------------------------------------

namespace {
// The number of a memory never changes, so a retained handle is the one that was there before.
CUmemGenericAllocationHandle handle_of(const Memory& memory) {
    return 0x5047'0000'0000 + memory.id;
}
}  // namespace

CUmemGenericAllocationHandle MemoryHandles::add(std::shared_ptr<Memory> memory) {
    return retain(memory);
}

CUmemGenericAllocationHandle MemoryHandles::retain(const std::shared_ptr<Memory>& memory) {
    const CUmemGenericAllocationHandle handle = handle_of(*memory);
    std::lock_guard lock(mutex_);
    Entry& entry = entries_.try_emplace(handle, Entry{memory, 0}).first->second;
    ++entry.count;
    return handle;
}

std::shared_ptr<Memory> MemoryHandles::get(CUmemGenericAllocationHandle handle) const {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(handle);
    require(found != entries_.end());
    return found->second.memory;
}

void MemoryHandles::release(CUmemGenericAllocationHandle handle) {
    std::shared_ptr<Memory> gone;  // ends after the lock
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(handle);
    require(found != entries_.end());
    if (--found->second.count > 0) return;
    gone = std::move(found->second.memory);
    entries_.erase(found);
}

std::vector<std::shared_ptr<Memory>> MemoryHandles::all() const {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Memory>> memories;
    for (const auto& [handle, entry] : entries_) memories.push_back(entry.memory);
    return memories;
}

// --- host memory ------------------------------------------------------------------------------

void HostRanges::add(HostRange range) {
    std::lock_guard lock(mutex_);
    const auto next = ranges_.lower_bound(range.address);
    const bool after = next != ranges_.end() && next->first - range.address < range.size;
    const bool before = next != ranges_.begin() &&
                        range.address - std::prev(next)->first < std::prev(next)->second.size;
    require(!after && !before, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    static uint64_t last_id = 1ull << 40;  // apart from those of heaps and memories
    range.id = ++last_id;
    ranges_[range.address] = range;
}

HostRange HostRanges::remove(uint64_t address, std::initializer_list<HostRange::Kind> kinds,
                             CUresult otherwise) {
    std::lock_guard lock(mutex_);
    const auto found = ranges_.find(address);
    require(
        found != ranges_.end() && std::count(kinds.begin(), kinds.end(), found->second.kind) > 0,
        otherwise);
    const HostRange range = found->second;
    ranges_.erase(found);
    return range;
}

HostRange HostRanges::find(uint64_t address) const {
    std::lock_guard lock(mutex_);
    const auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin()) return {};
    const HostRange& range = std::prev(next)->second;
    return address - range.address < range.size ? range : HostRange{};
}

bool HostRanges::any(HostRange::Kind kind) const {
    std::lock_guard lock(mutex_);
    return std::any_of(ranges_.begin(), ranges_.end(),
                       [&](const auto& entry) { return entry.second.kind == kind; });
}

std::vector<HostRange> HostRanges::remove_all_of(const Context* context) {
    std::lock_guard lock(mutex_);
    std::vector<HostRange> removed;
    for (auto range = ranges_.begin(); range != ranges_.end();) {
        if (range->second.context.get() != context) {
            ++range;
            continue;
        }
        removed.push_back(range->second);
        range = ranges_.erase(range);
    }
    return removed;
}

// --- the runtime ------------------------------------------------------------------------------

Device::Device(int ordinal_, unsigned gpu, const CUuuid& uuid)
    : ordinal(ordinal_), heap(ordinal_), graph_heap(ordinal_), first_gpu(gpu), first_uuid(uuid) {
    move_to(gpu, uuid);
}

void Device::move_to(unsigned gpu, const CUuuid& uuid) {
    gpu_ = gpu;
    uuid_ = uuid;
    const Config& config = runtime().config();
    registry_ = std::make_unique<Registry>(config.folder, gpu, config.memory);
}

Runtime::Runtime(Config config) : config_(std::move(config)) {}

Device& Runtime::device(int ordinal) {
    require(ordinal >= 0 && ordinal < device_count(), CUDA_ERROR_INVALID_DEVICE);
    return devices_[static_cast<size_t>(ordinal)];
}

int Runtime::ordinal_of(const std::string& gpu) const {
    for (const Device& device : devices_)
        if (device.name() == gpu) return device.ordinal;
    return -1;
}

void Runtime::require_importable(int ordinal) {
    const CUuuid& gpu = device(ordinal).uuid();
    for (const Device& device : devices_)
        if (same(device.first_uuid, gpu)) return;
    for (const CUuuid& known : config_.gpu_uuids())
        require(!same(known, gpu), CUDA_ERROR_NOT_INITIALIZED);
    fail(CUDA_ERROR_INVALID_DEVICE);
}

void Runtime::add_devices() {
    const std::vector<CUuuid> uuids = config_.gpu_uuids();
    for (const unsigned gpu : config_.visible) {
        Device& device = devices_.emplace_back(device_count(), gpu, uuids[gpu]);
        device.registry().used();  // throws if there can be no account
    }
}

void Runtime::remove_module(const ModulePtr& module) {
    functions.remove_if([&](const Function& function) { return &function.module == module.get(); });
    modules.remove(reinterpret_cast<CUmodule>(module.get()));
}

void Runtime::destroy(const ContextPtr& context) {
    context->close();
    streams.remove_if([&](const Stream& stream) { return &stream.context == context.get(); });
    events.remove_if([&](const Event& event) { return event.context == context; });
    libraries.for_each([&](Library& library) { library.forget(*context); });
    functions.remove_if(
        [&](const Function& function) { return function.module.context == context; });
    modules.remove_if([&](const Module& module) { return module.context == context; });
    device(context->device).heap.free_all_of(context.get());
    for (const HostRange& range : host.remove_all_of(context.get())) release_host(range);
    context->destroyed = true;
}

void Runtime::wait_for_device(int ordinal) {
    std::vector<Mark> marks;
    contexts.for_each([&](const Context& context) {
        if (context.device != ordinal) return;
        for (Mark& mark : context.tails()) marks.push_back(std::move(mark));
    });
    for (const Mark& mark : marks) mark.wait();
}

uint64_t Runtime::allocate(Heap& heap, int ordinal, size_t size, const Context* owner) {
    try {
        return heap.allocate(size, owner);
    } catch (const Error& error) {
        if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
    }
    wait_for_device(ordinal);
    pools.trim(ordinal);
    return heap.allocate(size, owner);
}

Heap* Runtime::heap_of(uint64_t address, Allocation* allocation, PoolPtr* pool) {
    for (Device& device : devices_)
        for (Heap* heap : {&device.heap, &device.graph_heap})
            if ((*allocation = heap->find(address)).size) return heap;
    PoolPtr found = pools.holding(address, allocation);
    Heap* heap = found ? &found->heap : nullptr;
    if (pool) *pool = std::move(found);
    return heap;
}

namespace {
// With g_init_mutex held.
Runtime& made_runtime() {
    if (Runtime* const made = g_runtime.load()) return *made;
    auto* made = new Runtime(Config::from_environment());
    require(!made->config().visible.empty(), CUDA_ERROR_NO_DEVICE);
    g_runtime = made;
    try {
        made->add_devices();
        start_control();
    } catch (...) {
        g_runtime = nullptr;  // what was made so far is small, and a second cuInit is rare
        throw;
    }
    static const int handled = pthread_atfork(nullptr, nullptr, after_fork_in_child);
    static_cast<void>(handled);
    return *made;
}
}  // namespace

void initialize() {
    require(!g_forked, CUDA_ERROR_NOT_INITIALIZED);
    std::lock_guard lock(g_init_mutex);
    if (g_cuda.load()) return;
    Runtime& made = made_runtime();
    made.device_file().take(made.config().device_file);
    g_cuda = true;
}

Runtime& runtime_for_nvml() {
    require(!g_forked, CUDA_ERROR_NOT_INITIALIZED);
    std::lock_guard lock(g_init_mutex);
    return made_runtime();
}

bool initialized() {
    return g_cuda.load();
}
bool forked() {
    return g_forked.load();
}
Runtime& runtime() {
    return *g_runtime.load();
}

ContextPtr current_even_broken() {
    const auto& stack = this_thread().stack;
    require(!stack.empty() && stack.back(), CUDA_ERROR_INVALID_CONTEXT);
    require(!stack.back()->destroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return stack.back();
}

ContextPtr current() {
    ContextPtr context = current_even_broken();
    context->check();
    return context;
}

StreamPtr stream_of(CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return current()->legacy();
    if (handle == CU_STREAM_PER_THREAD) {
        const ContextPtr context = current();
        auto& of = this_thread().default_streams[context.get()];
        if (!of.stream) of = {context, context->create_stream(Stream::Kind::per_thread, 0, 0)};
        return of.stream;
    }
    StreamPtr stream = runtime().streams.get(handle);
    stream->context.check();
    return stream;
}

}  // namespace phos::softgpu
