// phosd's socket for programs. All of this runs in threads of the program or on the hook's, and
// without any lock.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>

namespace phos::phosd_socket {

// The daemon that answered at the socket. A phosd that was started anew knows nothing of what the
// one before was told.
struct Daemon {
    dev_t device;
    ino_t inode;
    timespec changed;
    pid_t pid;  // 0: in a pid namespace that this process does not see
};

void look_in(const std::string& runtime_folder);

// Connects to phosd, which then makes the folder for the sockets of this user's hooks. False if it
// is not there.
bool call();

// Tells phosd of the wish `number` of this process. Returns PHOS_WAITING if phosd has heard it,
// PHOS_NOTHING if nobody is there, and PHOS_FAILED with the reason in `why`.
int tell(uint64_t number, uint32_t then, const char* name, Daemon* found, char* why, size_t size);

bool is_gone(const Daemon& known);

}  // namespace phos::phosd_socket
