// What the native tests share: checks that say where they failed, the driver, and a client.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/channel.h"
#include "base/driver.h"
#include "protocol/wire.h"

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (0)
#define OK(call) CHECK((call) == CUDA_SUCCESS)

namespace phos::test {

// Loads the driver and makes the primary context of device 0 current.
CUcontext start_cuda();

// Where the hooks of this user listen.
std::string hooks_folder();

// A client of this very process's hook.
class Client {
  public:
    explicit Client(int pid);
    ~Client();
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    struct Answer {
        wire::Status status;
        std::vector<unsigned char> payload;
        std::vector<int> descriptors;
    };
    Answer ask(wire::Type type, const void* payload = nullptr, size_t size = 0,
               const std::vector<int>& descriptors = {});

    wire::Hello hello();
    std::vector<wire::Block> list();
    // Exports every block; the descriptors are the keeper's from now on.
    std::vector<std::pair<uint64_t, int>> export_all();
    // Asks until the gate has settled; false when the deadline came first.
    bool close_gate(uint32_t deadline_ms, wire::GateState* last = nullptr);
    uint64_t seal_gate();
    void open_gate();
    uint64_t park();
    uint64_t unpark(const std::vector<std::pair<uint64_t, int>>& held);

    int socket;
};

// The number in an answer that must be a good one; prints what another says.
uint64_t count_of(const Client::Answer& answer);

}  // namespace phos::test
