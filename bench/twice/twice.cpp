// Launches kernels of a program a second time, and records whether its device memory was the same
// after both: the truth about what the analysis calls idempotent. For benches, on a real GPU.
//
// The driver loads this library where CUDA_INJECTION64_PATH names it, and CUPTI calls it at the
// entry and the exit of the driver's functions. What may touch device memory passes a gate; a
// launch that is run twice has it for itself, from its entry to the end of the second run. Nothing
// is run twice while a stream is captured, since the context cannot be synchronised then. A program
// whose kernels wait for what is launched later stands still for ever.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>

#include "code.h"
#include "cupti.h"
#include "driver.h"
#include "memory.h"
#include "records.h"
#include "rerun.h"

namespace twice {
namespace {

enum class Kind {
    other,  // not called back
    launch,
    launch_cooperatively,
    launch_ex,
    allocate,
    allocate_async,
    allocate_pitch,
    free,
    map,
    unmap,
    begin_capture,
    end_capture,
    load,
    load_file,
    unload,
    get_function,
    work,  // passes the gate, and no more
};

struct Call {
    Kind kind = Kind::other;
    void* function = nullptr;
};

std::vector<Call> calls;  // by CUPTI's number
pthread_rwlock_t gate = PTHREAD_RWLOCK_INITIALIZER;
std::atomic<int> captures{0};
std::atomic<bool> failed{false};
thread_local int depth = 0;         // of calls that are in each other
thread_local bool alone = false;    // this thread has the gate for itself
thread_local bool passing = false;  // or with others

Kind kind_of(std::string_view name) {
    for (const std::string_view suffix : {"_ptsz", "_ptds"})
        if (name.size() > suffix.size() && name.substr(name.size() - suffix.size()) == suffix)
            name.remove_suffix(suffix.size());
    static const std::map<std::string_view, Kind> kinds{
        {"cuLaunchKernel", Kind::launch},
        {"cuLaunchCooperativeKernel", Kind::launch_cooperatively},
        {"cuLaunchKernelEx", Kind::launch_ex},
        {"cuMemAlloc_v2", Kind::allocate},
        {"cuMemAllocAsync", Kind::allocate_async},
        {"cuMemAllocFromPoolAsync", Kind::allocate_async},
        {"cuMemAllocPitch_v2", Kind::allocate_pitch},
        {"cuMemFree_v2", Kind::free},
        {"cuMemFreeAsync", Kind::free},
        {"cuMemSetAccess", Kind::map},
        {"cuMemUnmap", Kind::unmap},
        {"cuStreamBeginCapture", Kind::begin_capture},
        {"cuStreamBeginCapture_v2", Kind::begin_capture},
        {"cuStreamBeginCaptureToGraph", Kind::begin_capture},
        {"cuStreamEndCapture", Kind::end_capture},
        {"cuModuleLoadData", Kind::load},
        {"cuModuleLoadDataEx", Kind::load},
        {"cuModuleLoadFatBinary", Kind::load},
        {"cuLibraryLoadData", Kind::load},
        {"cuModuleLoad", Kind::load_file},
        {"cuLibraryLoadFromFile", Kind::load_file},
        {"cuModuleUnload", Kind::unload},
        {"cuLibraryUnload", Kind::unload},
        {"cuKernelGetFunction", Kind::get_function},
    };
    if (const auto found = kinds.find(name); found != kinds.end()) return found->second;
    for (const std::string_view prefix : {"cuMemcpy", "cuMemset", "cuGraphLaunch"})
        if (name.substr(0, prefix.size()) == prefix) return Kind::work;
    return Kind::other;
}

bool is_launch(Kind kind) {
    return kind == Kind::launch || kind == Kind::launch_cooperatively || kind == Kind::launch_ex;
}

template <class Function>
Function* as(void* function) {
    return reinterpret_cast<Function*>(function);
}

Launch launch_of(const Call& call, const void* parameters) {
    Launch found;
    if (call.kind == Kind::launch_ex) {
        const auto given = *static_cast<const LaunchKernelEx*>(parameters);
        const CUlaunchConfig& shape = *given.configuration;
        found = {given.function,
                 {shape.gridDimX, shape.gridDimY, shape.gridDimZ},
                 {shape.blockDimX, shape.blockDimY, shape.blockDimZ},
                 shape.sharedMemBytes,
                 given.parameters,
                 given.extra,
                 {}};
        found.again = [given, function = call.function] {
            return as<decltype(cuLaunchKernelEx)>(function)(given.configuration, given.function,
                                                            given.parameters, given.extra);
        };
        return found;
    }
    const bool cooperates = call.kind == Kind::launch_cooperatively;
    const auto& given = *static_cast<const LaunchKernel*>(parameters);
    found = {given.function,
             {given.grid[0], given.grid[1], given.grid[2]},
             {given.block[0], given.block[1], given.block[2]},
             given.shared_bytes,
             given.parameters,
             cooperates ? nullptr : given.extra,
             {}};
    found.again = [&given, cooperates, function = call.function] {
        const auto& [grid, block] = std::tie(given.grid, given.block);
        if (cooperates)
            return as<decltype(cuLaunchCooperativeKernel)>(function)(
                given.function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                given.shared_bytes, given.stream, given.parameters);
        return as<decltype(cuLaunchKernel)>(function)(
            given.function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
            given.shared_bytes, given.stream, given.parameters, given.extra);
    };
    return found;
}

unsigned number_from(const char* variable, unsigned otherwise) {
    const char* const text = std::getenv(variable);
    return text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : otherwise;
}

// Returns whether a launch is one of the first of its kernel and grid.
bool is_chosen(const Launch& launch) {
    static const unsigned instances = number_from("TWICE_INSTANCES", 3);
    static const unsigned grids = number_from("TWICE_GRIDS", 16);
    static std::mutex mutex;
    static std::map<CUfunction, std::map<std::tuple<unsigned, unsigned, unsigned>, unsigned>> seen;
    const std::tuple grid(launch.grid[0], launch.grid[1], launch.grid[2]);
    const std::lock_guard lock(mutex);
    auto& of_kernel = seen[launch.function];
    if (of_kernel.size() >= grids && !of_kernel.count(grid)) return false;
    unsigned& count = of_kernel[grid];
    if (count >= instances) return false;
    ++count;
    return true;
}

void enter(const Call& call, const CallbackData& data) {
    if (depth++) return;
    if (is_launch(call.kind) && !failed.load() && is_chosen(launch_of(call, data.parameters))) {
        pthread_rwlock_wrlock(&gate);
        if (!captures.load()) {
            alone = true;
            return;
        }
        pthread_rwlock_unlock(&gate);
        note_skipped("a stream is captured");
    }
    pthread_rwlock_rdlock(&gate);
    passing = true;
}

// What a call has made is remembered.
void follow_made(const Call& call, const void* parameters) {
    switch (call.kind) {
        case Kind::allocate_async:
            if (captures.load()) return;  // a graph's: there is no memory before it is launched
            [[fallthrough]];
        case Kind::allocate: {
            const auto& given = *static_cast<const MemAlloc*>(parameters);
            return memory::add(*given.address, given.bytes);
        }
        case Kind::allocate_pitch: {
            const auto& given = *static_cast<const MemAllocPitch*>(parameters);
            return memory::add(*given.address, *given.pitch * given.height);
        }
        case Kind::map: {
            const auto& given = *static_cast<const MemSpan*>(parameters);
            return memory::add(given.address, given.bytes);
        }
        case Kind::load: {
            const auto& given = *static_cast<const Load*>(parameters);
            return code::note_image(*given.handle, given.image);
        }
        case Kind::load_file: {
            const auto& given = *static_cast<const Load*>(parameters);
            return code::note_file(*given.handle, static_cast<const char*>(given.image));
        }
        case Kind::get_function: {
            const auto& given = *static_cast<const GetFunction*>(parameters);
            return code::note_function(*given.function, given.kernel);
        }
        default:
            return;
    }
}

// What goes is forgotten before it does: others may be given it at once.
void follow_gone(const Call& call, const void* parameters) {
    if (call.kind == Kind::free)
        memory::remove(static_cast<const MemFree*>(parameters)->address);
    else if (call.kind == Kind::unmap)
        memory::remove(static_cast<const MemSpan*>(parameters)->address,
                       static_cast<const MemSpan*>(parameters)->bytes);
    else if (call.kind == Kind::unload)
        code::forget(static_cast<const Unload*>(parameters)->handle);
}

void leave(const Call& call, const CallbackData& data) {
    if (!depth || --depth) return;
    const bool succeeded = *static_cast<const CUresult*>(data.return_value) == CUDA_SUCCESS;
    if (succeeded) follow_made(call, data.parameters);
    if (succeeded && call.kind == Kind::begin_capture) ++captures;
    if (call.kind == Kind::end_capture) --captures;  // also if it was broken off
    if (alone && succeeded && !failed.load()) {
        const Launch launch = launch_of(call, data.parameters);
        try {
            rerun(launch);
        } catch (const Failed& error) {
            failed = true;  // the program's values are no longer its own
            Line()
                .text("error", error.call)
                .text("says", error.what())
                .text("kernel", name_of(launch.function))
                .write();
            std::fprintf(stderr, "twice: %s: %s\n", error.call, error.what());
        }
    }
    if (alone || passing) pthread_rwlock_unlock(&gate);
    alone = passing = false;
}

void called_back(void*, uint32_t domain, uint32_t number, const void* given) {
    if (domain != kDriverApi || number >= calls.size() || OwnCalls::active()) return;
    const OwnCalls own;
    const Call& call = calls[number];
    const auto& data = *static_cast<const CallbackData*>(given);
    if (data.site == kEnter) {
        enter(call, data);
        follow_gone(call, data.parameters);
    } else if (data.site == kExit) {
        leave(call, data);
    }
}

template <class Function>
void find(void* library, const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(library, name));
    if (!*function) throw Failed("dlsym", std::string("libcupti has no function ") + name);
}

void require_cupti(const Cupti& cupti, int result, const char* call) {
    const char* text = nullptr;
    if (!result) return;
    if (cupti.text_of(result, &text) || !text) text = "an unknown error";
    throw Failed(call, text);
}

void attach() {
    driver.load();
    const char* const path = std::getenv("TWICE_CUPTI");
    // The program may have loaded one: a second would not get the callbacks.
    void* library = dlopen("libcupti.so.13", RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = dlopen(path ? path : "libcupti.so.13", RTLD_NOW);
    if (!library) throw Failed("dlopen", dlerror());
    Cupti cupti{};
    find(library, "cuptiGetResultString", &cupti.text_of);
    find(library, "cuptiGetCallbackName", &cupti.name_of);
    find(library, "cuptiEnableCallback", &cupti.enable);
    find(library, "cuptiSubscribe", &cupti.subscribe);
    Subscriber subscriber = nullptr;
    calls.emplace_back();  // there is no number 0
    const char* name = nullptr;
    while (!cupti.name_of(kDriverApi, static_cast<uint32_t>(calls.size()), &name)) {
        const Kind kind = name ? kind_of(name) : Kind::other;
        calls.push_back({kind, is_launch(kind) ? driver.find(name) : nullptr});
        if (is_launch(kind) && !calls.back().function) calls.back().kind = Kind::work;
    }
    require_cupti(cupti, cupti.subscribe(&subscriber, called_back, nullptr), "cuptiSubscribe");
    uint64_t enabled = 0;
    for (uint32_t number = 1; number < calls.size(); ++number) {
        if (calls[number].kind == Kind::other) continue;
        require_cupti(cupti, cupti.enable(1, subscriber, kDriverApi, number),
                      "cuptiEnableCallback");
        ++enabled;
    }
    Line().text("attached", "cupti").number("calls", enabled).write();
}

}  // namespace
}  // namespace twice

// The driver calls it when it is initialised.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
    using namespace twice;
    const OwnCalls own;
    if (!open_records()) {
        std::perror("twice: the file that TWICE_RECORDS names");
        return 1;
    }
    try {
        attach();
    } catch (const Failed& error) {
        Line().text("error", error.call).text("says", error.what()).text("kernel", "").write();
        std::fprintf(stderr, "twice: %s: %s\n", error.call, error.what());
    }
    return 1;
}
