// What processes share of an interprocess event: words in host memory, which the device writes when
// a record is reached, and which hosts and devices of all these processes read. The memory is a
// block like any other, so it is parked, saved and restored with the processes
// (docs/design/interprocess-events.md).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/driver.h"
#include "memory/blocks.h"

namespace phos::event_words {

constexpr unsigned kCounters = 7;

// The value that a counter is to reach next, or has reached, and the process that has promised it.
struct Promise {
    uint32_t value = 0;
    int32_t by = 0;
};

// Counts records of one event. A record promises the next value, and the device writes it when the
// record is reached. Nobody may promise another one before that but on the same stream, whose
// writes come in order: so values only grow, and `at least` is a wait for a certain record.
struct Counter {
    std::atomic<uint32_t> reached;
    std::atomic<uint64_t> promised;

    Promise promise() const;
    bool replace(const Promise& before, const Promise& after);  // false if it is another by now
    bool is_at_rest() const { return promise().value == reached.load(); }
};

// The most recent record of an event: a counter and the value that it was promised, packed into a
// word that a single load reads. `generation` counts the events that have had these words.
struct Record {
    uint32_t generation = 0;
    uint32_t counter = kCounters;  // kCounters: the event was never recorded
    uint32_t value = 0;

    bool any() const { return counter < kCounters; }
    bool operator==(const Record& other) const {
        return generation == other.generation && counter == other.counter && value == other.value;
    }
};

struct Words {
    std::atomic<uint64_t> latest;
    Counter counters[kCounters];

    Record record() const;
    // Makes `record` the latest, unless the words have been given to another event meanwhile.
    void publish(const Record& record);
    bool has_reached(const Record& record) const;
    // Lets everybody go on who waits for a process that has ended before its device came to that.
    void keep_promises_of_the_dead();
};
static_assert(sizeof(Words) == 120);
constexpr uint64_t kStride = 128;
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Where an event's words are: at this address for the device and for the host alike.
struct Place {
    uint64_t address = 0;
    uint32_t generation = 0;

    // The words may be touched only inside a gate::Pass, or with blocks::mutex by readable().
    Words& words() const { return *reinterpret_cast<Words*>(address); }
    uint64_t address_of(const Record& record) const;
};

// These take blocks::mutex, and need a gate::Pass.

// Takes words for a new event of a context on `device`; CUDA_ERROR_NOT_SUPPORTED if neither this
// driver nor this machine has host memory that can be shared.
CUresult take(int device, Place* place);
void give_back(const Place& place);  // those of take()
// Lets the device reach words.
CUresult allow(uint64_t address, int device);

// Maps a block of words, for the device and the host; it is dropped on failure. A block that is no
// host memory is none: a ticket may be forged. Needs blocks::mutex.
CUresult map(blocks::Block* block, uint64_t address, uint64_t size, int device);

// Notes that other memory has taken the place of a block of words, after a restore: it may lie on
// another node of the host. Does nothing to other blocks.
void relocate(blocks::Block& block);

// Returns whether words can be read: not while they are parked. Needs blocks::mutex.
bool readable(uint64_t address);

}  // namespace phos::event_words
