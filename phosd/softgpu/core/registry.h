// The memory of one GPU that each process uses, over all processes of the machine.
//
// A file of fixed-size records, one for each process and physical allocation. An allocation is
// known by its inode, so memory that several processes hold counts once. The file is opened,
// locked and closed by each operation: a checkpoint finds nothing of it in the process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phos::softgpu {

class Registry {
  public:
    Registry(std::string folder, unsigned gpu, uint64_t total);

    // Claims `bytes` for the allocation `inode`; false when the GPU has no room for them.
    bool claim(uint64_t inode, uint64_t bytes);
    void release(uint64_t inode);
    // Drops what this process has claimed: a restored one meets its own claims, as it was killed.
    void release_all();
    uint64_t used();
    uint64_t total() const { return total_; }

  private:
    std::string folder_;
    std::string path_;
    uint64_t total_;
};

// Where a process with the software GPU listens (control.h); also the proof that it lives. Pids are
// those that processes have for themselves, so `token` tells those of several pid namespaces apart.
std::string control_name(int pid, uint64_t token);

// This process's own; 0 in a child of it. It stays the same when the process is restored, but if a
// copy of it is, which has been given another one.
uint64_t own_token();
void take_own_token(uint64_t token);
void forget_own_token();

struct ControlSocket {
    std::string name;  // without the leading '@'
    std::string inode;
};

// The sockets in /proc/net/unix whose names begin like this.
std::vector<ControlSocket> control_sockets(const std::string& beginning);

}  // namespace phos::softgpu
