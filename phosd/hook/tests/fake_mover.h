// A mover for native tests, in the program's own process but past the hook: it holds every block by
// an import, saves chunks as chunk_map.h says, and knows what each held when the board was armed.
#pragma once

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "../../engine/chunk_map/view.h"
#include "check.h"

namespace phos::test {

// The driver's own function, for the hook answers the exported name.
void* driver_function(const char* name);
#define DIRECT(name) (reinterpret_cast<decltype(&name)>(phos::test::driver_function(#name)))

// Closes the gate however long it takes.
void close_gate(Client& client);
// Memory of so many chunks, full of a value, and the first value of some memory.
CUdeviceptr filled(size_t chunks, unsigned value);
unsigned value_at(CUdeviceptr at);

struct Pace {
    unsigned before_us = 0;   // before each chunk
    unsigned copying_us = 0;  // while it is `copying`
    bool only_urgent = false;
    bool takes_shadowed = true;
    bool answers_without_doing = false;  // to pressure
};

class FakeMover {
  public:
    // Imports every block that the process exports, and makes a board with so many slots on each
    // device, in slabs of eight.
    FakeMover(Client& client, const std::vector<unsigned>& slots);
    ~FakeMover();
    FakeMover(const FakeMover&) = delete;
    FakeMover& operator=(const FakeMover&) = delete;

    // The answer to `arm`; the gate is closed. What memory holds now is what must be saved.
    Client::Answer arm(Client& client);
    void start(Pace pace);
    void stop();        // ends the thread; what is not saved is not
    bool wait_saved();  // false when it takes more than 20 seconds
    // Chunks whose saved bytes are not those of the instant of `arm`, or that are not saved.
    unsigned wrong();
    unsigned saved_from_slots() const { return from_slots_; }
    void let_go_of_freed();

    board::View& board() { return *board_; }
    uint32_t slab_count() const { return static_cast<uint32_t>(slabs_.size()); }

    int descriptor = -1;  // of the board

  private:
    struct Memory {
        CUmemGenericAllocationHandle handle = 0;
        CUdeviceptr address = 0;
        size_t size = 0;
        int descriptor = -1;
    };
    struct Part {
        uint64_t block;
        CUdeviceptr address;  // here
        size_t size;
    };
    Memory map(CUmemGenericAllocationHandle handle, size_t size, int device);
    void unmap(Memory& memory);
    void run(Pace pace);
    bool step(const Pace& pace);
    bool save(uint32_t chunk, const Pace& pace);
    void answer_pressure(const Pace& pace);

    std::map<uint64_t, Memory> blocks_;  // by id
    std::vector<Memory> slabs_;
    std::vector<Part> parts_;  // by chunk
    std::vector<std::vector<char>> expected_;
    std::vector<std::vector<char>> saved_;
    std::unique_ptr<board::View> board_;
    std::thread thread_;
    std::atomic<bool> over_{false};
    std::atomic<unsigned> from_slots_{0};
    uint32_t next_ = 0;
};

}  // namespace phos::test
