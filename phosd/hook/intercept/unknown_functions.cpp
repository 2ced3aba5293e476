#include "intercept/unknown_functions.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/process.h"
#include "gate/gate.h"

namespace phos {

namespace {

constexpr size_t kStandIns = 256;  // as in the assembly below
constexpr size_t kStubBytes = 16;

struct UnknownFunction {
    void* real = nullptr;
    std::string name;
    std::atomic<bool> called{false};
};

UnknownFunction unknown[kStandIns];
std::mutex mutex;  // guards the creation of stand-ins, which then do not change
size_t made = 0;

}  // namespace

// Called by every stub with its number; returns the function to continue in.
extern "C" __attribute__((visibility("hidden"), used)) void* phos_unknown_called(size_t number) {
    UnknownFunction& function = unknown[number];
    const KeepErrno keep;
    if (active() && !function.called.exchange(true))
        mark_not_parkable(Reason::unknown_function, "the program called " + function.name +
                                                        ", which this hook does not know");
    if (active()) const gate::Pass held_while_closed;
    return function.real;
}

// Stub n: push n, then the shared part, which keeps every register that can carry an argument.
asm(R"(
.text
.p2align 4
.type phos_unknown_common,@function
phos_unknown_common:
.cfi_startproc
.cfi_adjust_cfa_offset 8
pushq %rdi
pushq %rsi
pushq %rdx
pushq %rcx
pushq %r8
pushq %r9
subq $128, %rsp
.cfi_adjust_cfa_offset 176
movups %xmm0, (%rsp)
movups %xmm1, 16(%rsp)
movups %xmm2, 32(%rsp)
movups %xmm3, 48(%rsp)
movups %xmm4, 64(%rsp)
movups %xmm5, 80(%rsp)
movups %xmm6, 96(%rsp)
movups %xmm7, 112(%rsp)
movq 176(%rsp), %rdi
call phos_unknown_called
movq %rax, %r11
movups (%rsp), %xmm0
movups 16(%rsp), %xmm1
movups 32(%rsp), %xmm2
movups 48(%rsp), %xmm3
movups 64(%rsp), %xmm4
movups 80(%rsp), %xmm5
movups 96(%rsp), %xmm6
movups 112(%rsp), %xmm7
addq $128, %rsp
popq %r9
popq %r8
popq %rcx
popq %rdx
popq %rsi
popq %rdi
addq $8, %rsp
.cfi_adjust_cfa_offset -184
jmp *%r11
.cfi_endproc
.size phos_unknown_common,.-phos_unknown_common

.p2align 4
.hidden phos_unknown_stubs
.globl phos_unknown_stubs
phos_unknown_stubs:
.set phos_unknown_number, 0
.rept 256
.p2align 4
endbr64
pushq $phos_unknown_number
jmp phos_unknown_common
.set phos_unknown_number, phos_unknown_number + 1
.endr
)");

extern "C" __attribute__((visibility("hidden"))) char phos_unknown_stubs[];

void* stand_in(const char* name, void* real) {
    const std::lock_guard lock(mutex);
    for (size_t n = 0; n < made; ++n)
        if (unknown[n].real == real) return phos_unknown_stubs + n * kStubBytes;
    if (made == kStandIns) return nullptr;
    unknown[made].real = real;
    unknown[made].name = name;
    return phos_unknown_stubs + made++ * kStubBytes;
}

}  // namespace phos
