// Iterate over state that lies where few programs have it, or that kernels reach in another way.
//
//     nvcc -O2 -rdc=true -arch=native -std=c++20 -o resident resident.cu
//     resident heap|relaunched|pageable|threads
//
// heap: lists in the device's own heap, which kernels allocate and free. relaunched: a graph on the
// device that launches itself. pageable: memory of malloc, which kernels write. threads: 200
// threads, each with a stream. Prints lines as native.cu does.

#include <cuda_runtime.h>

#include <barrier>
#include <cstdlib>
#include <thread>
#include <vector>

#include "native.h"

namespace {

using native::advance;
using native::filled;
using native::kCount;
using native::kThreads;
using native::last_of;
using native::Step;

struct Link {
    float value;
    Link* next;
};

constexpr int kLongest = 32;

__device__ Link* lists[kThreads];
__device__ int lengths[kThreads];
__device__ double sums[kThreads];

// Each thread puts a link before its list, made of the first one, and frees a list that has grown
// to its length but for the first link.
__global__ void extend(float by) {
    const int own = threadIdx.x;
    Link* made = static_cast<Link*>(std::malloc(sizeof(Link)));
    if (made == nullptr) {
        __trap();
    }
    made->value = (lists[own] ? lists[own]->value : 0.0f) * 0.999f + by + own;
    made->next = lists[own];
    lists[own] = made;
    lengths[own] += 1;
    sums[own] = 0.0;
    for (const Link* each = made; each; each = each->next) {
        sums[own] += each->value;
    }
    if (lengths[own] > kLongest + own % 7) {
        for (Link* each = made->next; each;) {
            Link* freed = each;
            each = each->next;
            std::free(freed);
        }
        made->next = nullptr;
        lengths[own] = 1;
    }
}

Step heap() {
    REQUIRE(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 256 << 20));
    return [] {
        extend<<<1, kThreads>>>(0.5f);
        double found[kThreads], total = 0.0;
        REQUIRE(cudaMemcpyFromSymbol(found, sums, sizeof found));
        for (const double each : found) {
            total += each;
        }
        return total;
    };
}

constexpr int kLaunches = 20'000;

__device__ int left;

// One block works, and its graph launches itself behind this launch as long as some are left.
__global__ void relaunch(float* values, int count) {
    for (int at = threadIdx.x; at < count; at += blockDim.x) {
        values[at] = values[at] * 0.999f + 0.0625f;
    }
    __syncthreads();
    if (threadIdx.x == 0 && --left > 0) {
        cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
    }
}

Step relaunched() {
    constexpr int count = 4096;
    float* values = filled(count);
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream));
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    relaunch<<<1, kThreads, 0, stream>>>(values, count);
    REQUIRE(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t ready = nullptr;
    REQUIRE(cudaGraphInstantiate(&ready, graph, cudaGraphInstantiateFlagDeviceLaunch));
    REQUIRE(cudaGraphUpload(ready, stream));
    return [=] {
        int launches = kLaunches;
        REQUIRE(cudaMemcpyToSymbol(left, &launches, sizeof launches));
        REQUIRE(cudaGraphLaunch(ready, stream));
        REQUIRE(cudaStreamSynchronize(stream));
        REQUIRE(cudaMemcpyFromSymbol(&launches, left, sizeof launches));
        if (launches != 0) {
            std::fprintf(stderr, "%d launches were left\n", launches);
            std::exit(1);
        }
        return last_of(values, count);
    };
}

Step pageable() {
    constexpr size_t count = size_t{1} << 30;  // 4 GiB
    int device = 0, can = 0;
    REQUIRE(cudaGetDevice(&device));
    REQUIRE(cudaDeviceGetAttribute(&can, cudaDevAttrPageableMemoryAccess, device));
    if (!can) {
        std::fprintf(stderr, "not here: needs a GPU that reaches pageable memory (HMM)\n");
        std::exit(1);
    }
    auto* values = static_cast<float*>(std::calloc(count, sizeof(float)));
    auto* number = new size_t(0);
    return [=] {
        float* part = values + *number % (count / kCount) * kCount;
        *number += 1;
        advance<<<native::kBlocks, kThreads>>>(part, kCount, 0.125f);
        REQUIRE(cudaDeviceSynchronize());
        part[kCount - 1] += 1.0f;  // the host writes, too
        return static_cast<double>(part[kCount - 1]) + values[kCount - 1];
    };
}

Step threads() {
    constexpr int count = 200, size = 1 << 16;
    static std::barrier begun(count + 1), ended(count + 1);
    auto* values = new std::vector<float*>(count);
    for (int each = 0; each < count; ++each) {
        (*values)[each] = filled(size);
        std::thread([=] {
            cudaStream_t stream = nullptr;
            REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            for (;;) {
                begun.arrive_and_wait();
                advance<<<size / kThreads, kThreads, 0, stream>>>((*values)[each], size,
                                                                  0.125f * each);
                REQUIRE(cudaStreamSynchronize(stream));
                ended.arrive_and_wait();
            }
        }).detach();
    }
    return [=] {
        begun.arrive_and_wait();
        ended.arrive_and_wait();
        double total = 0.0;
        for (const float* each : *values) {
            total += last_of(each, size);
        }
        return total;
    };
}

}  // namespace

int main(int count, char** words) {
    return native::run(count, words,
                       {
                           {"heap", heap},
                           {"relaunched", relaunched},
                           {"pageable", pageable},
                           {"threads", threads},
                       });
}
