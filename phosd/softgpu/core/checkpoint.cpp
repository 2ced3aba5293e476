#include "core/checkpoint.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/control.h"
#include "core/error.h"
#include "core/identity.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

// Memory that must be free on each GPU of the process (H200: 8 MiB, hazard 51).
constexpr uint64_t kRoom = 8 << 20;

bool all_have_room(Runtime& rt) {
    for (int ordinal = 0; ordinal < rt.device_count(); ++ordinal) {
        Device& device = rt.device(ordinal);
        const bool used = [&] {
            const std::lock_guard lock(device.mutex);
            return device.primary != nullptr;
        }();
        Registry& registry = device.registry();
        if (used && registry.total() - registry.used() < kRoom) return false;
    }
    return true;
}

unsigned index_of(const CUuuid& uuid, const std::vector<CUuuid>& gpus) {
    unsigned index = 0;
    while (index < gpus.size() && !same(gpus[index], uuid)) ++index;
    return index;
}

std::vector<CUuuid> gpus_of(const ControlRequest& request) {
    require(request.gpu_count <= kMaxGpus);
    return {request.gpus, request.gpus + request.gpu_count};
}

// Which GPU of the machine, as `request` has it, each of the `known` GPUs is replaced by. There
// must be as many. The pairs name every known GPU and no other, and no GPU of the machine twice.
// Without pairs they must be the same.
std::map<unsigned, unsigned> moves_of(const ControlRequest& request,
                                      const std::vector<CUuuid>& known) {
    const std::vector<CUuuid> here = gpus_of(request);
    std::map<unsigned, unsigned> to;
    require(here.size() >= known.size(), CUDA_ERROR_NOT_SUPPORTED);
    if (request.pair_count == 0) {
        require(std::equal(known.begin(), known.end(), here.begin(), same));
        for (unsigned gpu = 0; gpu < known.size(); ++gpu) to[gpu] = gpu;
        return to;
    }
    require(request.pair_count == known.size());
    std::set<unsigned> targets;
    for (unsigned i = 0; i < request.pair_count; ++i) {
        const unsigned from = index_of(request.pairs[i].oldUuid, known);
        const unsigned target = index_of(request.pairs[i].newUuid, here);
        require(from < known.size() && target < here.size());
        require(to.emplace(from, target).second && targets.insert(target).second);
    }
    return to;
}

}  // namespace

Checkpoint& Checkpoint::instance() {
    static Checkpoint& checkpoint = *new Checkpoint;
    return checkpoint;
}

ControlReply Checkpoint::handle(const ControlRequest& request) {
    using Operation = ControlRequest::Operation;
    switch (request.operation) {
        case Operation::state:
            return {CUDA_SUCCESS, static_cast<int32_t>(state_)};
        case Operation::lock:
            lock(std::chrono::milliseconds(request.timeout_ms));
            break;
        case Operation::checkpoint:
            checkpoint();
            break;
        case Operation::restore:
            restore(request);
            break;
        case Operation::unlock:
            unlock();
            break;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
    return {CUDA_SUCCESS, 0};
}

void Checkpoint::need(CUprocessState state) const {
    require(state_ == state, CUDA_ERROR_ILLEGAL_STATE);
}

void Checkpoint::lock(std::chrono::milliseconds limit) {
    need(CU_PROCESS_STATE_RUNNING);
    require(runtime().gate().close(limit), CUDA_ERROR_NOT_READY);
    state_ = CU_PROCESS_STATE_LOCKED;
}

void Checkpoint::checkpoint() {
    need(CU_PROCESS_STATE_LOCKED);
    Runtime& rt = runtime();
    require(!rt.host.any(HostRange::Kind::managed) && !rt.pools.any_managed_memory(),
            CUDA_ERROR_NOT_SUPPORTED);
    // As the driver's: once there was too little room, it fails for good, though the process runs.
    require(!lacked_room_, CUDA_ERROR_UNKNOWN);
    lacked_room_ = !all_have_room(rt);
    require(!lacked_room_, CUDA_ERROR_OUT_OF_MEMORY);
    state_ = CU_PROCESS_STATE_FAILED;  // unless it is done in full
    std::map<Memory*, uint64_t> mapped_at;
    for (const Mapping& mapping : rt.space().mappings())
        if (mapped_at.emplace(mapping.memory.get(), mapping.address).second)
            saved_.push_back(mapping.memory);
    for (const auto& memory : rt.memory.all())
        if (mapped_at.emplace(memory.get(), 0).second) saved_.push_back(memory);
    for (const auto& memory : saved_) memory->save(mapped_at.at(memory.get()));
    rt.space().hide();
    for (DeviceFile* const file : {&rt.device_file(), &rt.file_of_nvml()}) file->suspend();
    state_ = CU_PROCESS_STATE_CHECKPOINTED;
}

void Checkpoint::restore(const ControlRequest& request) {
    need(CU_PROCESS_STATE_CHECKPOINTED);
    Runtime& rt = runtime();
    const auto to = moves_of(request, known_);
    for (int ordinal = 0; ordinal < rt.device_count(); ++ordinal)
        require(to.count(rt.device(ordinal).gpu()) == 1);
    follow_control_name();
    // As the driver's: from here on, what goes wrong is final, and the state does not tell.
    require(!lost_, CUDA_ERROR_OPERATING_SYSTEM);
    lost_ = true;
    require(std::none_of(saved_.begin(), saved_.end(),
                         [](const auto& memory) { return memory->imported; }),
            CUDA_ERROR_NOT_SUPPORTED);
    require(!rt.pools.any_imported(), CUDA_ERROR_OPERATING_SYSTEM);
    for (const auto& move : to) {
        const Config& config = rt.config();
        Registry(config.folder, move.first, config.memory).release_all();
    }
    known_ = gpus_of(request);
    for (int ordinal = 0; ordinal < rt.device_count(); ++ordinal) {
        Device& device = rt.device(ordinal);
        const unsigned gpu = to.at(device.gpu());
        device.move_to(gpu, known_[gpu]);
    }
    for (DeviceFile* const file : {&rt.device_file(), &rt.file_of_nvml()})
        if (file->taken()) file->resume();
    for (const auto& memory : saved_) memory->load();
    rt.space().reveal();
    for (const auto& memory : saved_) memory->settle();
    saved_.clear();
    lost_ = false;
    state_ = CU_PROCESS_STATE_LOCKED;
}

void Checkpoint::unlock() {
    need(CU_PROCESS_STATE_LOCKED);
    state_ = CU_PROCESS_STATE_RUNNING;
    runtime().gate().open();
}

}  // namespace phos::softgpu
