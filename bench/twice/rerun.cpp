#include "rerun.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "code.h"
#include "driver.h"
#include "memory.h"
#include "records.h"

namespace twice {
namespace {

// Counts the units of 16 bytes, and the bytes after the last of them, in which two ranges differ.
constexpr char kCompare[] = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry twice_compare(.param .u64 one, .param .u64 other, .param .u64 bytes,
                              .param .u64 counter)
{
    .reg .pred %p<4>;
    .reg .b16 %h<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<24>;

    ld.param.u64 %rd1, [one];
    ld.param.u64 %rd2, [other];
    ld.param.u64 %rd3, [bytes];
    ld.param.u64 %rd4, [counter];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    cvta.to.global.u64 %rd4, %rd4;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %rd5, %r1, %r2;
    cvt.u64.u32 %rd6, %r3;
    add.s64 %rd5, %rd5, %rd6;
    mov.u64 %rd20, %rd5;
    mul.wide.u32 %rd7, %r4, %r2;
    shr.u64 %rd8, %rd3, 4;
    mov.u32 %r5, 0;
NEXT:
    setp.ge.u64 %p1, %rd5, %rd8;
    @%p1 bra REST;
    shl.b64 %rd9, %rd5, 4;
    add.s64 %rd10, %rd1, %rd9;
    add.s64 %rd11, %rd2, %rd9;
    ld.global.v2.u64 {%rd12, %rd13}, [%rd10];
    ld.global.v2.u64 {%rd14, %rd15}, [%rd11];
    xor.b64 %rd16, %rd12, %rd14;
    xor.b64 %rd17, %rd13, %rd15;
    or.b64 %rd18, %rd16, %rd17;
    setp.ne.u64 %p2, %rd18, 0;
    @%p2 add.u32 %r5, %r5, 1;
    add.s64 %rd5, %rd5, %rd7;
    bra NEXT;
REST:
    shl.b64 %rd9, %rd8, 4;
    add.s64 %rd9, %rd9, %rd20;
    setp.ge.u64 %p1, %rd9, %rd3;
    @%p1 bra TELL;
    add.s64 %rd10, %rd1, %rd9;
    add.s64 %rd11, %rd2, %rd9;
    ld.global.u8 %h1, [%rd10];
    ld.global.u8 %h2, [%rd11];
    setp.ne.u16 %p2, %h1, %h2;
    @%p2 add.u32 %r5, %r5, 1;
TELL:
    setp.eq.u32 %p3, %r5, 0;
    @%p3 bra END;
    red.global.add.u32 [%rd4], %r5;
END:
    ret;
}
)";
constexpr unsigned kThreads = 256;
constexpr uint64_t kMostBlocks = 1056;
constexpr uint64_t kAligned = 256;

using Parameters = std::vector<unsigned char>;

// Room for a copy of all memory, and what compares it: of one context.
struct Aside {
    CUcontext context = nullptr;
    CUdeviceptr room = 0;
    uint64_t bytes = 0;
    CUdeviceptr counter = 0;
    CUfunction compare = nullptr;
};

Aside made() {
    Aside aside;
    CUmodule module = nullptr;
    TWICE_CALL(cuCtxGetCurrent, &aside.context);
    TWICE_CALL(cuModuleLoadData, &module, kCompare);
    TWICE_CALL(cuModuleGetFunction, &aside.compare, module, "twice_compare");
    TWICE_CALL(cuMemAlloc_v2, &aside.counter, sizeof(uint32_t));
    size_t free = 0;
    size_t total = 0;
    TWICE_CALL(cuMemGetInfo_v2, &free, &total);
    // The program is left the rest: it may not have all of its memory yet.
    const char* const percent = std::getenv("TWICE_PERCENT");
    const uint64_t share = percent ? std::strtoul(percent, nullptr, 10) : 40;
    aside.bytes = std::min(total / 100 * share, free / 5 * 3) / kAligned * kAligned;
    TWICE_CALL(cuMemAlloc_v2, &aside.room, aside.bytes);
    return aside;
}

template <class Ask>
bool read_layout(Ask ask, std::vector<std::pair<size_t, size_t>>* layout) {
    for (size_t index = 0;; ++index) {
        size_t offset = 0;
        size_t size = 0;
        const CUresult result = ask(index, &offset, &size);
        if (result == CUDA_ERROR_INVALID_VALUE) return true;  // past the last one
        if (result != CUDA_SUCCESS) return false;
        layout->emplace_back(offset, size);
    }
}

// Returns where each parameter is. The handle is a function, or a library's kernel used as one.
std::vector<std::pair<size_t, size_t>> layout_of(CUfunction function) {
    std::vector<std::pair<size_t, size_t>> layout;
    const auto of_function = [&](size_t index, size_t* offset, size_t* size) {
        return driver.cuFuncGetParamInfo(function, index, offset, size);
    };
    if (read_layout(of_function, &layout)) return layout;
    layout.clear();
    const auto kernel = reinterpret_cast<CUkernel>(function);
    const auto of_kernel = [&](size_t index, size_t* offset, size_t* size) {
        return driver.cuKernelGetParamInfo(kernel, index, offset, size);
    };
    if (read_layout(of_kernel, &layout)) return layout;
    throw Failed("cuKernelGetParamInfo", "the parameters of a kernel are not told");
}

// Returns the bytes of a launch's parameters.
Parameters parameters_of(const Launch& launch) {
    if (launch.extra) {
        const void* buffer = nullptr;
        size_t size = 0;
        for (void** at = launch.extra; *at != CU_LAUNCH_PARAM_END; at += 2) {
            if (at[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = at[1];
            if (at[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *static_cast<size_t*>(at[1]);
        }
        const auto* const bytes = static_cast<const unsigned char*>(buffer);
        return buffer ? Parameters(bytes, bytes + size) : Parameters();
    }
    Parameters found;
    const auto layout = layout_of(launch.function);
    for (size_t index = 0; launch.parameters && index < layout.size(); ++index) {
        const auto [offset, size] = layout[index];
        found.resize(std::max(found.size(), offset + size));
        std::memcpy(&found[offset], launch.parameters[index], size);
    }
    return found;
}

struct Copy {
    CUdeviceptr from;
    CUdeviceptr to;
    uint64_t bytes;
};

// Returns the number of differences between memory and its copies.
uint32_t differences(const Aside& aside, const std::vector<Copy>& copies) {
    uint32_t count = 0;
    TWICE_CALL(cuMemsetD32_v2, aside.counter, 0, 1);
    for (Copy copy : copies) {
        CUdeviceptr counter = aside.counter;
        void* parameters[] = {&copy.from, &copy.to, &copy.bytes, &counter};
        const auto blocks =
            static_cast<unsigned>(std::clamp<uint64_t>(copy.bytes / 16 / kThreads, 1, kMostBlocks));
        TWICE_CALL(cuLaunchKernel, aside.compare, blocks, 1, 1, kThreads, 1, 1, 0, nullptr,
                   parameters, nullptr);
    }
    TWICE_CALL(cuCtxSynchronize);
    TWICE_CALL(cuMemcpyDtoH_v2, &count, aside.counter, sizeof count);
    return count;
}

}  // namespace

std::string name_of(CUfunction function) {
    const char* name = nullptr;
    if (driver.cuFuncGetName(&name, function) == CUDA_SUCCESS && name) return name;
    const auto kernel = reinterpret_cast<CUkernel>(function);
    if (driver.cuKernelGetName(&name, kernel) == CUDA_SUCCESS && name) return name;
    return "";
}

void rerun(const Launch& launch) {
    static const Aside aside = made();
    // The program's other processes write to the same file.
    static uint64_t number = static_cast<uint64_t>(getpid()) << 32;
    CUcontext context = nullptr;
    TWICE_CALL(cuCtxGetCurrent, &context);
    if (context != aside.context) return note_skipped("another context");
    const Parameters parameters = parameters_of(launch);
    std::vector<Copy> copies;
    uint64_t used = 0;
    for (const auto& [begin, end] : memory::all()) {
        copies.push_back({begin, aside.room + used, end - begin});
        used += (end - begin + kAligned - 1) / kAligned * kAligned;
    }
    if (copies.empty()) return note_skipped("no memory is known");
    if (used > aside.bytes) return note_skipped("more memory than there is room for");

    const code::Place place = code::place_of(launch.function);
    const memory::Pointed pointed = memory::pointed_into(parameters);
    TWICE_CALL(cuCtxSynchronize);
    for (const Copy& copy : copies)
        TWICE_CALL(cuMemcpyDtoDAsync_v2, copy.to, copy.from, copy.bytes, nullptr);
    TWICE_CALL(cuCtxSynchronize);
    ++number;
    Line()
        .number("begun", number)
        .text("kernel", name_of(launch.function))
        .numbers("grid", launch.grid)
        .numbers("block", launch.block)
        .number("shared", launch.shared_bytes)
        .bytes("parameters", parameters)
        .pairs("extents", pointed.ranges)
        .number("strays", pointed.strays)
        .number("memory", used)
        .text("library", place.library)
        .text("code", place.path)
        .number("offset", place.offset)
        .number("size", place.size)
        .write();
    require(launch.again(), "the second launch");
    TWICE_CALL(cuCtxSynchronize);
    const uint32_t count = differences(aside, copies);
    Line().number("ended", number).number("differing", count).write();
    if (!count) return;
    for (const Copy& copy : copies)
        TWICE_CALL(cuMemcpyDtoDAsync_v2, copy.from, copy.to, copy.bytes, nullptr);
    TWICE_CALL(cuCtxSynchronize);
}

}  // namespace twice
