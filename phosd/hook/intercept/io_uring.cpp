// Programs whose libraries could do without io_uring do without it: CRIU does not save a ring.
// libuv, which is in PyTorch and in event loops of Python and Node.js, makes one whatever
// UV_USE_IO_URING says since 1.49, by syscall(2), and goes on without if that fails. It is told
// EPERM, as containers and kernel.io_uring_disabled tell it, if UV_USE_IO_URING is 0, which
// `phos run` sets. All other calls are passed on unchanged.
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

extern "C" {

// What the jump below looks at. Until the constructor has run it is libc's work, done here.
__attribute__((visibility("hidden"))) bool phos_no_io_uring = false;
__attribute__((visibility("hidden"))) extern char phos_plain_syscall[];
__attribute__((visibility("hidden"))) void* phos_next_syscall = phos_plain_syscall;

__attribute__((visibility("hidden"), used)) long phos_refuse_io_uring() {
    errno = EPERM;
    return -1;
}

__attribute__((visibility("hidden"), used)) long phos_failed_syscall(long negative) {
    errno = static_cast<int>(-negative);
    return -1;
}
}

// A jump, so that the arguments, the stack and the return address are the caller's own.
asm(R"(
.text
.p2align 4
.globl syscall
.type syscall,@function
syscall:
.cfi_startproc
    endbr64
    cmpb $0, phos_no_io_uring(%rip)
    jne 1f
0:  jmp *phos_next_syscall(%rip)
1:  cmpq $425, %rdi        # io_uring_setup
    jne 0b
    jmp phos_refuse_io_uring
.cfi_endproc
.size syscall,.-syscall

.p2align 4
.type phos_plain_syscall,@function
phos_plain_syscall:
.cfi_startproc
    endbr64
    movq %rdi, %rax
    movq %rsi, %rdi
    movq %rdx, %rsi
    movq %rcx, %rdx
    movq %r8, %r10
    movq %r9, %r8
    movq 8(%rsp), %r9
    syscall
    cmpq $-4095, %rax
    jae 1f
    ret
1:  movq %rax, %rdi
    jmp phos_failed_syscall
.cfi_endproc
.size phos_plain_syscall,.-phos_plain_syscall
)");

namespace phos::io_uring {
namespace {

__attribute__((constructor)) void begin() {
    if (void* const found = dlvsym(RTLD_NEXT, "syscall", "GLIBC_2.2.5"))
        __atomic_store_n(&phos_next_syscall, found, __ATOMIC_RELAXED);
    const char* value = std::getenv("UV_USE_IO_URING");
    phos_no_io_uring = value && std::strcmp(value, "0") == 0;
}

}  // namespace
}  // namespace phos::io_uring
