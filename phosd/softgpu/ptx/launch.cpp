// Runs a grid: blocks one after another, more of them at once where they wait for each other. One
// thread runs them all, so a kernel's atomic additions come in the same order every time.
#include <sched.h>

#include <algorithm>
#include <cstdio>

#include "block.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace phos::ptx {

void fault(CUresult code, std::string text) {
    throw Fault{code, std::move(text)};
}

void bad_address(CUresult code, uint64_t address, uint64_t bytes, Space space, bool write) {
    char hex[32];
    std::snprintf(hex, sizeof hex, "0x%llx", static_cast<unsigned long long>(address));
    const char* where = space == Space::shared  ? " of shared memory"
                        : space == Space::local ? " of local memory"
                        : space == Space::param ? " of the parameters"
                                                : "";
    fault(code, std::string(code == CUDA_ERROR_MISALIGNED_ADDRESS ? "misaligned " : "illegal ") +
                    (write ? "write of " : "read of ") + std::to_string(bytes) + " bytes at " +
                    hex + where);
}

namespace {

// Rounds in which no block finished before it begins another one beside them.
constexpr unsigned kPatience = 64;
// Such rounds after which others get the processor, for which these blocks may be spinning.
constexpr unsigned kRoundsToYield = 16;
constexpr size_t kMostResident = 64;

// The operations expect rounding to nearest and subnormal numbers.
class FloatingPointMode {
#ifdef __SSE__
  public:
    FloatingPointMode() : saved_(_mm_getcsr()) { _mm_setcsr(_MM_MASK_MASK); }
    ~FloatingPointMode() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#endif
};

class Grid {
  public:
    explicit Grid(const Launch& launch)
        : launch_(launch),
          program_(static_cast<const KernelCode*>(launch.kernel)->program),
          blocks_(uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z) {}

    Failure run() {
        work();
        return failure_;
    }

  private:
    using Runners = std::vector<std::unique_ptr<BlockRunner>>;

    // Takes blocks until none is left. Another one is begun when those that run make no end: they
    // may be spinning for it.
    void work() {
        const FloatingPointMode mode;
        softgpu::MemoryUsers::Use use(launch_.memory->users);
        Runners resident, idle;
        try {
            const size_t most = launch_.cooperative ? blocks_ : kMostResident;
            size_t wanted = launch_.cooperative ? blocks_ : 1;
            unsigned patience = kPatience, rounds = 0;
            while (!failure_) {
                admit(resident, idle, wanted);
                if (resident.empty()) break;
                if (advance(resident, idle, use)) {
                    rounds = 0;
                    continue;
                }
                // Not each time: on a busy machine every yield costs the kernel a time slice.
                if (++rounds % kRoundsToYield == 0) ::sched_yield();
                if (rounds >= patience && wanted < most) {
                    rounds = 0;
                    ++wanted;
                    patience += kPatience;
                }
            }
        } catch (const Fault& fault) {
            failure_ = {fault.code, launch_.kernel->name + ": " + fault.text};
        } catch (const std::bad_alloc&) {
            failure_ = {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                        launch_.kernel->name + ": no host memory for its blocks"};
        }
        for (const auto& block : resident) count(*block);
    }

    void admit(Runners& resident, Runners& idle, size_t wanted) {
        while (resident.size() < wanted) {
            if (next_ == blocks_) return;
            if (idle.empty()) {
                resident.push_back(std::make_unique<BlockRunner>(launch_, program_, grid_));
            } else {
                resident.push_back(std::move(idle.back()));
                idle.pop_back();
            }
            resident.back()->start(next_++);
        }
    }

    // One turn for each block; whether one of them finished.
    bool advance(Runners& resident, Runners& idle, softgpu::MemoryUsers::Use& use) {
        bool finished = false;
        for (auto& block : resident) {
            if (!block->run(use)) continue;
            finished = true;
            count(*block);
            idle.push_back(std::move(block));
        }
        resident.erase(std::remove(resident.begin(), resident.end(), nullptr), resident.end());
        if (launch_.abandon && launch_.abandon->load(std::memory_order_relaxed))
            failure_ = {CUDA_ERROR_LAUNCH_FAILED,
                        launch_.kernel->name + ": the launch was abandoned"};
        return finished;
    }

    void count(BlockRunner& block) {
        if (launch_.instructions)
            launch_.instructions->fetch_add(block.take_instructions(), std::memory_order_relaxed);
    }

    static uint32_t number() {
        static std::atomic<uint32_t> grids{0};
        return grids.fetch_add(1, std::memory_order_relaxed);
    }

    const Launch& launch_;
    const Program& program_;
    const uint64_t blocks_;
    const uint32_t grid_ = number();
    uint64_t next_ = 0;
    Failure failure_;
};

}  // namespace

Failure run(const Launch& launch) {
    const auto positive = [](const Dim3& d) { return d.x > 0 && d.y > 0 && d.z > 0; };
    if (!launch.kernel || !launch.memory || !positive(launch.grid) || !positive(launch.block) ||
        !positive(launch.cluster))
        return {CUDA_ERROR_INVALID_VALUE,
                "a launch needs a kernel, memory, and a grid and block of at least one"};
    const uint64_t threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
    if (threads > launch.kernel->max_threads)
        return {CUDA_ERROR_INVALID_VALUE, launch.kernel->name + ": a block of " +
                                              std::to_string(threads) + " threads, of at most " +
                                              std::to_string(launch.kernel->max_threads)};
    return Grid(launch).run();
}

}  // namespace phos::ptx
