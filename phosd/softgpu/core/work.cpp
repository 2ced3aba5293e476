#include "core/work.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "core/context.h"
#include "core/error.h"
#include "core/runtime.h"
#include "core/trace.h"

namespace phos::softgpu {
namespace {

// Bytes move no faster than PHOS_SOFTGPU_COPY_RATE: then all copies and fills of the process share
// one copy engine, which does one at a time. With PHOS_SOFTGPU_COPY_RATE_WHILE the rate holds only
// as long as that file exists.
class Pace {
  public:
    explicit Pace(uint64_t bytes) {
        const double rate = runtime().config().copy_rate;
        if (rate <= 0) return;
        static std::mutex engine;
        turn_ = std::unique_lock(engine);
        end_ = std::chrono::steady_clock::now() +
               std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                   std::chrono::duration<double>(static_cast<double>(bytes) / rate));
    }
    ~Pace() {
        while (turn_ && holds() && std::chrono::steady_clock::now() < end_)
            std::this_thread::sleep_until(
                std::min(end_, std::chrono::steady_clock::now() + std::chrono::milliseconds(2)));
    }

  private:
    static bool holds() {
        const std::string& file = runtime().config().slow_while;
        return file.empty() || access(file.c_str(), F_OK) == 0;
    }

    std::unique_lock<std::mutex> turn_;
    std::chrono::steady_clock::time_point end_;
};

bool reachable(const End& end, uint64_t address, size_t bytes, bool write) {
    if (!end.device || runtime().space().reachable(address, bytes, write)) return true;
    char text[96];
    std::snprintf(text, sizeof text, "a copy %s %zu bytes at 0x%llx, which is not mapped",
                  write ? "writes" : "reads", bytes, static_cast<unsigned long long>(address));
    explain(text);
    return false;
}

}  // namespace

CUresult Copy::run(Context&) const {
    TraceEntry trace(TraceEntry::Kind::copy);
    const Pace pace(width_ * rows_ * slices_);
    MemoryUsers::Use use(runtime().space().users);
    const uint64_t source =
        snapshot_.empty() ? from_.address : reinterpret_cast<uint64_t>(snapshot_.data());
    for (size_t slice = 0; slice < slices_; ++slice)
        for (size_t row = 0; row < rows_; ++row) {
            const uint64_t to = to_.address + (slice * to_.height + row) * to_.pitch;
            const uint64_t from = source + (slice * from_.height + row) * from_.pitch;
            if (!reachable(to_, to, width_, true) || !reachable(from_, from, width_, false))
                return CUDA_ERROR_ILLEGAL_ADDRESS;
            std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), width_);
            if (to_.device) trace.wrote(to, width_);
            if (from_.device) trace.read(from, width_);
            use.pause();
        }
    return CUDA_SUCCESS;
}

CUresult Fill::run(Context&) const {
    TraceEntry trace(TraceEntry::Kind::fill);
    const Pace pace(width_ * element_ * rows_);
    MemoryUsers::Use use(runtime().space().users);
    for (size_t row = 0; row < rows_; ++row) {
        const uint64_t to = address_ + row * pitch_;
        if (!reachable({to, true}, to, width_ * element_, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
        switch (element_) {
            case 1:
                std::memset(reinterpret_cast<void*>(to), static_cast<int>(value_), width_);
                break;
            case 2:
                std::fill_n(reinterpret_cast<uint16_t*>(to), width_, static_cast<uint16_t>(value_));
                break;
            default:
                std::fill_n(reinterpret_cast<uint32_t*>(to), width_, value_);
        }
        trace.wrote(to, width_ * element_);
        use.pause();
    }
    return CUDA_SUCCESS;
}

CUresult HostCall::run(Context&) const {
    InCallback here;
    function_(data_);
    return CUDA_SUCCESS;
}

CUresult StreamCallback::run(Context& context) const {
    InCallback here;
    function_(stream_, context.broken(), data_);
    return CUDA_SUCCESS;
}

CUresult RecordEvent::run(Context&) const {
    record_->time = std::chrono::steady_clock::now();
    return CUDA_SUCCESS;
}

namespace {

uint64_t load(uint64_t address, unsigned bytes) {
    return bytes == 4 ? reinterpret_cast<std::atomic<uint32_t>*>(address)->load()
                      : reinterpret_cast<std::atomic<uint64_t>*>(address)->load();
}

bool satisfied(uint64_t seen, uint64_t value, unsigned bytes, unsigned flags) {
    const uint64_t mask = bytes == 4 ? 0xffffffffu : ~0ull;
    switch (flags & 3) {
        case CU_STREAM_WAIT_VALUE_EQ:
            return seen == value;
        case CU_STREAM_WAIT_VALUE_AND:
            return (seen & value) != 0;
        case CU_STREAM_WAIT_VALUE_NOR:
            return (~(seen | value) & mask) != 0;
        default:  // GEQ, cyclic: the difference is not negative
            return bytes == 4 ? static_cast<int32_t>(seen - value) >= 0
                              : static_cast<int64_t>(seen - value) >= 0;
    }
}

CUresult wait_for_value(const Context& context, uint64_t address, uint64_t value, unsigned bytes,
                        unsigned flags) {
    auto pause = std::chrono::microseconds(1);
    while (context.broken() == CUDA_SUCCESS) {
        {
            const MemoryUsers::Use use(runtime().space().users);
            if (!runtime().space().reachable(address, bytes, false))
                return CUDA_ERROR_ILLEGAL_ADDRESS;
            if (satisfied(load(address, bytes), value, bytes, flags)) break;
        }
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 2, std::chrono::microseconds(500));
    }
    return CUDA_SUCCESS;
}

CUresult write_value(uint64_t address, uint64_t value, unsigned bytes) {
    TraceEntry trace(TraceEntry::Kind::write);
    const MemoryUsers::Use use(runtime().space().users);
    if (!runtime().space().reachable(address, bytes, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    trace.wrote(address, bytes);
    if (bytes == 4)
        reinterpret_cast<std::atomic<uint32_t>*>(address)->store(static_cast<uint32_t>(value));
    else
        reinterpret_cast<std::atomic<uint64_t>*>(address)->store(value);
    return CUDA_SUCCESS;
}

CUresult run_operation(const Context& context, const CUstreamBatchMemOpParams& operation) {
    const auto& wait = operation.waitValue;
    const auto& write = operation.writeValue;
    switch (operation.operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
            return wait_for_value(context, wait.address, wait.value, 4, wait.flags);
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
            return wait_for_value(context, wait.address, wait.value64, 8, wait.flags);
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
            return write_value(write.address, write.value, 4);
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            return write_value(write.address, write.value64, 8);
        default:  // flushes and barriers: a stream's work is in order
            return CUDA_SUCCESS;
    }
}

}  // namespace

CUresult ValueOperations::run(Context& context) const {
    CUresult result = CUDA_SUCCESS;
    for (const CUstreamBatchMemOpParams& operation : operations_)
        if (result == CUDA_SUCCESS) result = run_operation(context, operation);
    return result;
}

}  // namespace phos::softgpu
