// Prints how many PTX thread instructions a second the machine runs, one JSON object in all.
#include <chrono>
#include <cstring>
#include <string>

#include "machine.h"
#include "tests/memory.h"

namespace phos::ptx {
namespace {

const char kHead[] = ".version 8.0\n.target sm_80\n.address_size 64\n";

const char kSaxpy[] = R"(
.visible .entry k(.param .u64 x, .param .u64 y, .param .u32 n) {
  .reg .pred %p<2>; .reg .f32 %f<4>; .reg .b32 %r<6>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1; @%p1 bra DONE;
  mul.wide.s32 %rd3, %r5, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.f32 %f1, [%rd4]; ld.global.f32 %f2, [%rd5];
  fma.rn.f32 %f3, %f1, 0f40200000, %f2; st.global.f32 [%rd5], %f3;
DONE: ret; })";

const char kMatmul[] = R"(
.visible .entry k(.param .u64 x, .param .u64 y, .param .u32 n) {
  .reg .pred %p<3>; .reg .f32 %f<5>; .reg .b32 %r<24>; .reg .b64 %rd<10>;
  .shared .align 4 .b8 left[1024]; .shared .align 4 .b8 right[1024];
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x; mov.u32 %r3, %tid.y; mov.u32 %r4, left; mov.u32 %r5, right;
  shl.b32 %r6, %r3, 6; shl.b32 %r7, %r2, 2; add.s32 %r8, %r4, %r6; add.s32 %r9, %r5, %r7;
  add.s32 %r10, %r8, %r7; add.s32 %r11, %r9, %r6; mov.f32 %f1, 0f00000000; mov.u32 %r12, 0;
  mad.lo.s32 %r13, %r3, 16, %r2; mul.wide.s32 %rd3, %r13, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
TILE: ld.global.f32 %f2, [%rd4]; st.shared.f32 [%r10], %f2; ld.global.f32 %f3, [%rd5]; st.shared.f32 [%r11], %f3;
  bar.sync 0; mov.u32 %r14, 0; mov.u32 %r15, %r8; mov.u32 %r16, %r9;
INNER: ld.shared.f32 %f2, [%r15]; ld.shared.f32 %f3, [%r16]; fma.rn.f32 %f1, %f2, %f3, %f1;
  add.s32 %r15, %r15, 4; add.s32 %r16, %r16, 64; add.s32 %r14, %r14, 1; setp.lt.s32 %p1, %r14, 16; @%p1 bra INNER;
  bar.sync 0; add.s32 %r12, %r12, 1; setp.lt.s32 %p2, %r12, 64; @%p2 bra TILE;
  st.global.f32 [%rd5], %f1; ret; })";

const char kHash[] = R"(
.visible .entry k(.param .u64 x, .param .u64 y, .param .u32 n) {
  .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<10>;
  ld.param.u64 %rd2, [y]; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;
  mul.wide.s32 %rd3, %r5, 8; add.s64 %rd4, %rd2, %rd3; cvt.u64.u32 %rd5, %r5; mov.u32 %r1, 0;
LOOP: mul.lo.s64 %rd6, %rd5, 7046029254386353131; shr.u64 %rd7, %rd6, 29; xor.b64 %rd5, %rd6, %rd7;
  add.s64 %rd5, %rd5, 1442695040888963407; add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 256; @%p1 bra LOOP;
  st.global.u64 [%rd4], %rd5; ret; })";

const char kDivergent[] = R"(
.visible .entry k(.param .u64 x, .param .u64 y, .param .u32 n) {
  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<6>;
  ld.param.u64 %rd2, [y]; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;
  mul.wide.s32 %rd3, %r5, 4; add.s64 %rd4, %rd2, %rd3; and.b32 %r6, %r5, 1023; add.s32 %r6, %r6, 1; mov.u32 %r7, 0;
LOOP: setp.eq.s32 %p1, %r6, 1; @%p1 bra DONE; and.b32 %r8, %r6, 1; setp.eq.s32 %p2, %r8, 0; @%p2 bra EVEN;
  mad.lo.s32 %r6, %r6, 3, 1; bra NEXT;
EVEN: shr.u32 %r6, %r6, 1;
NEXT: add.s32 %r7, %r7, 1; bra LOOP;
DONE: st.global.u32 [%rd4], %r7; ret; })";

// Runs `ptx` for about half a second; thread instructions a second.
double measure(const char* ptx, Dim3 grid, Dim3 block, test::Memory& memory) {
    Failure failure;
    const auto module =
        Module::load(std::string(kHead) + ptx, [](size_t, size_t, bool) { return 0; }, failure);
    if (!module) {
        std::fprintf(stderr, "%s\n", failure.text.c_str());
        std::exit(1);
    }
    struct {
        uint64_t x, y;
        uint32_t n;
    } parameters{memory.allocate(8 << 20), memory.allocate(8 << 20), 1u << 20};
    std::atomic<uint64_t> instructions{0};
    Launch launch;
    launch.kernel = module->kernels()[0];
    launch.grid = grid;
    launch.block = block;
    launch.parameters = reinterpret_cast<const std::byte*>(&parameters);
    launch.memory = &memory;
    launch.instructions = &instructions;
    const auto begin = std::chrono::steady_clock::now();
    std::chrono::duration<double> elapsed{};
    do {
        failure = run(launch);
        if (failure) {
            std::fprintf(stderr, "%s\n", failure.text.c_str());
            std::exit(1);
        }
        elapsed = std::chrono::steady_clock::now() - begin;
    } while (elapsed.count() < 0.5);
    return static_cast<double>(instructions) / elapsed.count();
}

}  // namespace
}  // namespace phos::ptx

int main() {
    using namespace phos::ptx;
    test::Memory memory(uint64_t{128} << 20);
    const double saxpy = measure(kSaxpy, {4096, 1, 1}, {256, 1, 1}, memory);
    const double matmul = measure(kMatmul, {64, 1, 1}, {16, 16, 1}, memory);
    const double hash = measure(kHash, {256, 1, 1}, {256, 1, 1}, memory);
    const double divergent = measure(kDivergent, {64, 1, 1}, {256, 1, 1}, memory);
    std::printf(
        "{\"unit\": \"PTX thread instructions a second\", \"saxpy\": %.0f, \"matmul\": %.0f, "
        "\"hash\": %.0f, \"divergent\": %.0f}\n",
        saxpy, matmul, hash, divergent);
}
