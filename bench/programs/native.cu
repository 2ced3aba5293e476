// Iterate over device memory with a part of CUDA's runtime that libraries use, and that differs in
// what the driver has to keep for it.
//
//     nvcc -O2 -rdc=true -arch=native -o native native.cu -lcublas -lcusolver -lcufft
//     native
//     blas|thrust|dynamic|cooperative|texture|mapped|registered|callback|conditional|destroyed|peers
//
// Prints a line for each step: number, value in hexadecimal, seconds, end on the monotonic clock.

#include <cooperative_groups.h>
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <thrust/device_vector.h>
#include <thrust/reduce.h>
#include <thrust/sort.h>

#include "native.h"

namespace {

using native::advance;
using native::filled;
using native::kBlocks;
using native::kCount;
using native::kThreads;
using native::last_of;
using native::Step;

__global__ void launch_child(float* values, int count) {
    advance<<<count / kThreads, kThreads>>>(values, count, 0.5f);
}

__global__ void meet(float* values, int count) {
    auto grid = cooperative_groups::this_grid();
    for (int round = 0; round < 4; ++round) {
        for (int at = static_cast<int>(grid.thread_rank()); at < count;
             at += static_cast<int>(grid.size())) {
            values[at] = values[at] * 0.9f + values[(at + 1) % count] * 0.0f + round;
        }
        grid.sync();
    }
}

__global__ void look_up(cudaTextureObject_t texture, cudaSurfaceObject_t surface, float* values,
                        int side) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < side && y < side) {
        float found = tex2D<float>(texture, x + 0.5f, y + 0.5f) * 0.5f + 1.0f;
        values[y * side + x] = found;
        surf2Dwrite(found, surface, x * static_cast<int>(sizeof(float)), y);
    }
}

__global__ void count_down(cudaGraphConditionalHandle handle, int* left) {
    *left -= 1;
    cudaGraphSetConditional(handle, *left > 0 ? 1 : 0);
}

__global__ void set_left(int* left, int to) {
    *left = to;
}

Step blas() {
    constexpr int side = 2048;
    static cublasHandle_t handle;
    if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) {
        std::exit(1);
    }
    float *a = filled(side * side), *b = filled(side * side), *c = filled(side * side);
    advance<<<side * side / kThreads, kThreads>>>(a, side * side, 1e-3f);
    advance<<<side * side / kThreads, kThreads>>>(b, side * side, 1e-3f);
    return [=] {
        const float one = 1.0f, half = 0.5f;
        for (int round = 0; round < 10; ++round) {
            cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, side, side, side, &one, a, side, b, side,
                        &half, c, side);
        }
        advance<<<side * side / kThreads, kThreads>>>(a, side * side, 1e-6f);
        return last_of(c, side * side);
    };
}

Step sorted() {
    auto* keys = new thrust::device_vector<unsigned>(kCount);
    auto* seed = new unsigned(1);
    return [=] {
        *seed = *seed * 1664525u + 1013904223u;
        const unsigned salt = *seed;
        thrust::tabulate(keys->begin(), keys->end(),
                         [salt] __device__(unsigned at) { return (at + salt) * 2654435761u; });
        thrust::sort(keys->begin(), keys->end());
        return static_cast<double>((*keys)[kCount / 2]) +
               thrust::reduce(keys->begin(), keys->end());
    };
}

Step dynamic() {
    float* values = filled(kCount);
    return [=] {
        launch_child<<<1, 1>>>(values, kCount);
        return last_of(values, kCount);
    };
}

Step cooperative() {
    float* values = filled(kCount);
    return [=] {
        int count = kCount;
        float* first = values;
        void* arguments[] = {&first, &count};
        REQUIRE(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(meet), dim3(132),
                                            dim3(kThreads), arguments, 0, nullptr));
        return last_of(values, kCount);
    };
}

Step texture() {
    constexpr int side = 2048;
    float* values = filled(side * side);
    cudaArray_t array = nullptr;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    REQUIRE(cudaMallocArray(&array, &format, side, side, cudaArraySurfaceLoadStore));
    REQUIRE(cudaMemcpy2DToArray(array, 0, 0, values, side * sizeof(float), side * sizeof(float),
                                side, cudaMemcpyDeviceToDevice));
    cudaResourceDesc resource{};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc description{};
    description.readMode = cudaReadModeElementType;
    cudaTextureObject_t read = 0;
    cudaSurfaceObject_t write = 0;
    REQUIRE(cudaCreateTextureObject(&read, &resource, &description, nullptr));
    REQUIRE(cudaCreateSurfaceObject(&write, &resource));
    return [=] {
        look_up<<<dim3(side / 16, side / 16), dim3(16, 16)>>>(read, write, values, side);
        return last_of(values, side * side);
    };
}

Step of_host(float* seen, float* values) {
    return [=] {
        advance<<<kBlocks, kThreads>>>(values, kCount, 0.25f);
        REQUIRE(cudaDeviceSynchronize());
        seen[0] += 1.0f;  // the host writes, too
        return static_cast<double>(seen[kCount - 1]) + seen[0];
    };
}

Step mapped() {
    float *seen = nullptr, *values = nullptr;
    REQUIRE(cudaHostAlloc(&seen, sizeof(float) * kCount, cudaHostAllocMapped));
    REQUIRE(cudaHostGetDevicePointer(&values, seen, 0));
    return of_host(seen, values);
}

Step registered() {
    auto* seen = static_cast<float*>(std::aligned_alloc(4096, sizeof(float) * kCount));
    float* values = nullptr;
    REQUIRE(cudaHostRegister(seen, sizeof(float) * kCount, cudaHostRegisterMapped));
    REQUIRE(cudaHostGetDevicePointer(&values, seen, 0));
    return of_host(seen, values);
}

Step callback() {
    float* values = filled(kCount);
    static double seen = 0.0;
    static cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream));
    return [=] {
        advance<<<kBlocks, kThreads, 0, stream>>>(values, kCount, 0.125f);
        REQUIRE(cudaLaunchHostFunc(
            stream, [](void* total) { *static_cast<double*>(total) += 1.0; }, &seen));
        REQUIRE(cudaStreamSynchronize(stream));
        return last_of(values, kCount) + seen;
    };
}

Step conditional() {
    float* values = filled(kCount);
    int* left = nullptr;
    REQUIRE(cudaMalloc(&left, sizeof *left));
    static cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream));
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle{};
    REQUIRE(cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNodeParams loop{};
    loop.type = cudaGraphNodeTypeConditional;
    loop.conditional.handle = handle;
    loop.conditional.type = cudaGraphCondTypeWhile;
    loop.conditional.size = 1;
    cudaGraphNode_t node = nullptr;
#if CUDART_VERSION >= 13000
    REQUIRE(cudaGraphAddNode(&node, graph, nullptr, nullptr, 0, &loop));
#else
    REQUIRE(cudaGraphAddNode(&node, graph, nullptr, 0, &loop));
#endif
    cudaGraph_t body = loop.conditional.phGraph_out[0];
    REQUIRE(cudaStreamBeginCaptureToGraph(stream, body, nullptr, nullptr, 0,
                                          cudaStreamCaptureModeGlobal));
    advance<<<kBlocks, kThreads, 0, stream>>>(values, kCount, 0.0625f);
    count_down<<<1, 1, 0, stream>>>(handle, left);
    REQUIRE(cudaStreamEndCapture(stream, nullptr));
    cudaGraphExec_t ready = nullptr;
    REQUIRE(cudaGraphInstantiate(&ready, graph, 0));
    return [=] {
        set_left<<<1, 1, 0, stream>>>(left, 7);
        REQUIRE(cudaGraphLaunch(ready, stream));
        REQUIRE(cudaStreamSynchronize(stream));
        return last_of(values, kCount);
    };
}

Step destroyed() {
    float* values = filled(kCount);
    return [=] {
        cudaStream_t stream = nullptr;
        REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        advance<<<kBlocks, kThreads, 0, stream>>>(values, kCount, 0.03125f);
        REQUIRE(cudaStreamDestroy(stream));  // while it works
        REQUIRE(cudaDeviceSynchronize());
        return last_of(values, kCount);
    };
}

__global__ void fetch(const float* theirs, float* own, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) {
        own[at] = 0.5f * own[at] + 0.25f * theirs[count - 1 - at];
    }
}

// Two GPUs: each reads the other's memory in a kernel, and copies are made between them.
Step peers() {
    float* values[2];
    float* copies[2];
    for (int device = 0; device < 2; ++device) {
        REQUIRE(cudaSetDevice(device));
        REQUIRE(cudaDeviceEnablePeerAccess(1 - device, 0));
        values[device] = filled(kCount);
        copies[device] = filled(kCount);
        advance<<<kBlocks, kThreads>>>(values[device], kCount, 1.0f + device);
        REQUIRE(cudaDeviceSynchronize());
    }
    float *one = values[0], *other = values[1], *first = copies[0], *second = copies[1];
    return [=] {
        REQUIRE(cudaSetDevice(0));
        fetch<<<kBlocks, kThreads>>>(other, one, kCount);
        advance<<<kBlocks, kThreads>>>(one, kCount, 0.125f);
        REQUIRE(cudaMemcpyPeer(second, 1, one, 0, sizeof(float) * kCount));
        REQUIRE(cudaDeviceSynchronize());
        REQUIRE(cudaSetDevice(1));
        fetch<<<kBlocks, kThreads>>>(second, other, kCount);
        REQUIRE(cudaMemcpyPeer(first, 0, other, 1, sizeof(float) * kCount));
        REQUIRE(cudaDeviceSynchronize());
        return last_of(first, kCount) + last_of(one, kCount);
    };
}

}  // namespace

int main(int count, char** words) {
    return native::run(count, words,
                       {
                           {"blas", blas},
                           {"thrust", sorted},
                           {"dynamic", dynamic},
                           {"cooperative", cooperative},
                           {"texture", texture},
                           {"mapped", mapped},
                           {"registered", registered},
                           {"callback", callback},
                           {"conditional", conditional},
                           {"destroyed", destroyed},
                           {"peers", peers},
                       });
}
