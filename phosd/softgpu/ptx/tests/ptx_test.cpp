// The machine by itself: what it refuses, how launches fail, and that no text makes it crash.
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../machine.h"
#include "memory.h"

namespace phos::ptx {
namespace {

int failures = 0;

void expect(bool good, const char* what, const std::string& detail = "") {
    if (good) return;
    ++failures;
    std::fprintf(stderr, "FAILED: %s %s\n", what, detail.c_str());
}

const std::string kHead = ".version 8.0\n.target sm_80\n.address_size 64\n";

std::string kernel(const std::string& body) {
    return kHead +
           ".visible .entry k(.param .u64 x) {\n.reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 "
           "%r<8>; .reg "
           ".f32 %f<8>; .reg .b64 %rd<8>;\nld.param.u64 %rd0, [x];\n" +
           body + "\nret;\n}\n";
}

Failure load(const std::string& text, test::Memory& memory,
             std::unique_ptr<Module>* out = nullptr) {
    Failure failure;
    auto module = Module::load(
        text, [&](size_t size, size_t align, bool) { return memory.allocate(size, align); },
        failure);
    expect(static_cast<bool>(module) != static_cast<bool>(failure),
           "a load gives a module or a failure");
    if (out) *out = std::move(module);
    return failure;
}

Failure launch(const std::string& text, test::Memory& memory, uint64_t argument,
               Dim3 grid = {1, 1, 1}, Dim3 block = {32, 1, 1},
               const std::atomic<bool>* abandon = nullptr) {
    std::unique_ptr<Module> module;
    if (Failure failure = load(text, memory, &module)) return failure;
    Launch launch;
    launch.kernel = module->kernels().at(0);
    launch.grid = grid;
    launch.block = block;
    launch.parameters = reinterpret_cast<const std::byte*>(&argument);
    launch.memory = &memory;
    launch.abandon = abandon;
    return run(launch);
}

void expect_failure(const char* what, const Failure& failure, CUresult code, const char* part) {
    expect(failure.code == code, what,
           "code " + std::to_string(failure.code) + ": " + failure.text);
    expect(failure.text.find(part) != std::string::npos, what, "text: " + failure.text);
}

void refusals(test::Memory& memory) {
    expect_failure("an unknown instruction", load(kernel("frobnicate.u32 %r0, %r1;"), memory),
                   CUDA_ERROR_NOT_SUPPORTED, "frobnicate.u32");
    expect_failure("its line", load(kernel("frobnicate.u32 %r0, %r1;"), memory),
                   CUDA_ERROR_NOT_SUPPORTED, "line 7");
    expect_failure("an unknown modifier", load(kernel("add.sideways.u32 %r0, %r1, %r2;"), memory),
                   CUDA_ERROR_NOT_SUPPORTED, "sideways");
    expect_failure(
        "an instruction of tensor cores",
        load(kernel("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r0}, [%rd0];"), memory),
        CUDA_ERROR_NOT_SUPPORTED, "wmma");
    expect_failure("a label that is missing", load(kernel("bra NOWHERE;"), memory),
                   CUDA_ERROR_INVALID_PTX, "NOWHERE");
    expect_failure("a register that is missing", load(kernel("add.u32 %r0, %r1, %q9;"), memory),
                   CUDA_ERROR_NOT_SUPPORTED, "%q9");
    expect_failure("too few operands", load(kernel("add.u32 %r0, %r1;"), memory),
                   CUDA_ERROR_INVALID_PTX, "operands");
    expect_failure("a narrow register", load(kernel("add.u64 %rd0, %r1, %rd2;"), memory),
                   CUDA_ERROR_INVALID_PTX, "narrower");
    expect_failure("an empty text", load("", memory), CUDA_ERROR_INVALID_PTX, "no PTX");
    expect_failure("no version", load(".target sm_80\n", memory), CUDA_ERROR_INVALID_PTX,
                   ".version");
    expect_failure("no memory", load(kHead + ".global .b8 big[1073741824];", memory),
                   CUDA_ERROR_OUT_OF_MEMORY, "variables");
}

void faults(test::Memory& memory) {
    const uint64_t good = memory.allocate(4096);
    expect(!launch(kernel("st.global.u32 [%rd0], 7;"), memory, good), "a good store");
    expect_failure("a null store", launch(kernel("st.global.u32 [%rd0], 7;"), memory, 0),
                   CUDA_ERROR_ILLEGAL_ADDRESS, "0x0");
    expect_failure("an unmapped load",
                   launch(kernel("ld.global.u32 %r0, [%rd0];"), memory, uint64_t{0x6fff'0000'0000}),
                   CUDA_ERROR_ILLEGAL_ADDRESS, "0x6fff00000000");
    expect_failure("a misaligned load",
                   launch(kernel("ld.global.u32 %r0, [%rd0+2];"), memory, good),
                   CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned");
    expect_failure("beyond shared memory",
                   launch(kernel(".shared .b8 s[64]; mov.u32 %r0, 64; st.shared.u32 [%r0], %r1;"),
                          memory, good),
                   CUDA_ERROR_ILLEGAL_ADDRESS, "shared");
    expect_failure("a generic address of nothing",
                   launch(kernel("st.u32 [%rd0], 7;"), memory, 0x0100'0000'0000'0000),
                   CUDA_ERROR_ILLEGAL_ADDRESS, "shared");
    expect_failure("trap", launch(kernel("trap;"), memory, good), CUDA_ERROR_LAUNCH_FAILED, "trap");
    expect_failure("a block that is too large",
                   launch(kernel(""), memory, good, {1, 1, 1}, {1025, 1, 1}),
                   CUDA_ERROR_INVALID_VALUE, "1025");
    expect_failure(
        "a barrier that is never full",
        launch(
            kernel(
                "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; @%p0 bar.sync 1, 64; bar.sync 0;"),
            memory, good, {1, 1, 1}, {64, 1, 1}),
        CUDA_ERROR_LAUNCH_FAILED, "barrier");
    std::atomic<bool> abandon{false};
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        abandon = true;
    });
    expect_failure("a launch that is abandoned",
                   launch(kernel("L: ld.volatile.global.u32 %r0, [%rd0]; bra L;"), memory, good,
                          {4, 1, 1}, {32, 1, 1}, &abandon),
                   CUDA_ERROR_LAUNCH_FAILED, "abandoned");
    later.join();
}

// Two launches on two threads, each waiting for what the other writes; blocks that wait for later
// ones.
void spinning(test::Memory& memory) {
    const uint64_t flags = memory.allocate(64);
    std::memset(reinterpret_cast<void*>(flags), 0, 64);
    const std::string ping = kernel(
        "st.volatile.global.u32 [%rd0], 1; L: ld.volatile.global.u32 %r0, [%rd0+4]; setp.eq.u32 "
        "%p0, %r0, 0; @%p0 bra L;");
    const std::string pong = kernel(
        "L: ld.volatile.global.u32 %r0, [%rd0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra L; "
        "st.volatile.global.u32 [%rd0+4], 1;");
    Failure first;
    std::thread other([&] { first = launch(ping, memory, flags); });
    const Failure second = launch(pong, memory, flags);
    other.join();
    expect(!first && !second, "two kernels that wait for each other", first.text + second.text);
    const std::string chain = kernel(
        "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %nctaid.x; sub.u32 %r1, %r1, 1; setp.eq.u32 %p0, %r0, "
        "%r1; @%p0 bra LAST;"
        "L: ld.volatile.global.u32 %r2, [%rd0+8]; setp.eq.u32 %p1, %r2, 0; @%p1 bra L; bra DONE;"
        "LAST: st.volatile.global.u32 [%rd0+8], 1; DONE:");
    const Failure third = launch(chain, memory, flags, {4, 1, 1});
    expect(!third, "blocks that wait for a later one", third.text);
}

// Damaged texts: any answer will do, but one must come.
void fuzz(test::Memory& memory) {
    const std::string good = kernel(
        ".shared .align 8 .b8 s[64]; .local .b8 l[16]; { .reg .b32 t; mov.u32 t, %tid.x; add.s32 "
        "%r0, t, 0x10; }\n"
        "setp.lt.and.s32 %p0|%p1, %r0, 5, %p2; @!%p0 bra L1; ld.global.v2.u32 {%r1, %r2}, "
        "[%rd0+8];\n"
        "fma.rn.ftz.f32 %f0, %f1, 0f3F800000, %f2; shfl.sync.bfly.b32 %r3|%p1, %r0, 1, 31, -1; "
        "cvt.rzi.s32.f32 %r4, %f0;\n"
        "T: .branchtargets L1, L2; brx.idx %r0, T; L1: atom.global.add.u32 %r5, [%rd0], 1; L2: "
        "bar.sync 0; mov.b32 {%h0, %h1}, %r0;");
    std::mt19937 random(7);
    const std::string alphabet = " \n\t.,;:[](){}<>@!|+-%$_\"/*0129afxL";
    for (int i = 0; i < 4000; ++i) {
        std::string text = good;
        for (unsigned edits = 1 + random() % 4; edits > 0; --edits) {
            const size_t at = random() % text.size();
            switch (random() % 4) {
                case 0:
                    text[at] = alphabet[random() % alphabet.size()];
                    break;
                case 1:
                    text.erase(at, 1 + random() % 12);
                    break;
                case 2:
                    text.insert(at, 1, alphabet[random() % alphabet.size()]);
                    break;
                default:
                    text.insert(at, text.substr(random() % text.size(), random() % 24));
                    break;
            }
            if (text.empty()) text = " ";
        }
        load(text, memory);
    }
    for (size_t length = 0; length < good.size(); ++length) load(good.substr(0, length), memory);
}

}  // namespace
}  // namespace phos::ptx

int main() {
    using namespace phos::ptx;
    test::Memory memory(uint64_t{64} << 20);
    refusals(memory);
    faults(memory);
    spinning(memory);
    fuzz(memory);
    std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
