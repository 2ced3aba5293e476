// io_uring_setup by syscall(2) fails where UV_USE_IO_URING is 0, and is the kernel's otherwise; all
// other calls are the kernel's, with six arguments, results and errors.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "check.h"

namespace {

// What the kernel says itself: a descriptor, or an error as a negative number.
long setup_by_kernel() {
    io_uring_params parameters{};
    long result = SYS_io_uring_setup;
    asm volatile("syscall" : "+a"(result) : "D"(4L), "S"(&parameters) : "rcx", "r11", "memory");
    return result;
}

void makes_a_ring() {
    io_uring_params parameters{};
    errno = 0;
    const long made = syscall(SYS_io_uring_setup, 4, &parameters);
    const char* value = std::getenv("UV_USE_IO_URING");
    if (value && std::strcmp(value, "0") == 0) {
        CHECK(made == -1);
        CHECK(errno == EPERM);
        return;
    }
    const long native = setup_by_kernel();
    CHECK((made >= 0) == (native >= 0));
    if (native < 0) CHECK(errno == -native);
    if (made >= 0) close(static_cast<int>(made));
    if (native >= 0) close(static_cast<int>(native));
}

void passes_everything_on() {
    CHECK(syscall(SYS_getpid) == getpid());
    errno = 0;
    CHECK(syscall(SYS_close, -1) == -1);
    CHECK(errno == EBADF);
    char name[] = "/tmp/phos-XXXXXX";
    const int file = mkstemp(name);
    CHECK(file >= 0);
    unlink(name);
    CHECK(ftruncate(file, 3 * 4096) == 0);
    CHECK(pwrite(file, "third", 5, 2 * 4096) == 5);
    // The sixth argument is on the stack of the caller.
    const long at = syscall(SYS_mmap, nullptr, 4096, PROT_READ, MAP_PRIVATE, file, 2 * 4096L);
    CHECK(at > 0);
    CHECK(std::memcmp(reinterpret_cast<const void*>(at), "third", 5) == 0);
    munmap(reinterpret_cast<void*>(at), 4096);
    close(file);
}

// Before any library's constructor has run, the hook's included.
bool passed_early = false;
void try_early() {
    passes_everything_on();
    passed_early = true;
}

}  // namespace

__attribute__((section(".preinit_array"), used)) static void (*const early)() = try_early;

int main() {
    CHECK(passed_early);
    passes_everything_on();
    makes_a_ring();
}
