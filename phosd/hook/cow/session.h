// What a job holds in the process from `arm` to `forget`: the board, the shadow slots, and the
// tables that map addresses to chunks. Threads that use any of these are readers, and nothing is
// ended while there are readers.
#pragma once

#include <pthread.h>

#include <deque>
#include <memory>
#include <vector>

#include "base/outcome.h"
#include "cow/armed.h"
#include "cow/shadows.h"

namespace phos::cow {

// The mappings of blocks at one time. Includes the program's own memory that is not on the board,
// since an allocation may span it.
struct AddressTable {
    struct Entry {
        uint64_t begin;
        uint64_t end;
        uint64_t offset;        // in the block
        TrackedBlock* tracked;  // null if it is not on the board
        uint32_t extent;
    };
    // A run of the program's own mappings that adjoin each other, or one of the hook's mappings.
    struct Extent {
        uint32_t first;  // entries
        uint32_t last;
        mutable std::atomic<uint32_t> undone{0};  // all entries before it are done
    };
    std::vector<Entry> entries;  // by address
    std::vector<uint64_t> ends;  // of the entries, contiguous for the search
    std::deque<Extent> extents;

    // Returns the first entry that ends above the address; `entries.size()` if there is none.
    size_t at_or_after(uint64_t address) const;
};

struct Session {
    MappedChunkMap board;
    int client = -1;                    // the client that armed it
    std::vector<TrackedBlock> tracked;  // by id, and so by first chunk
    std::unique_ptr<Shadows> shadows[board::kMaxDevices];
    std::atomic<const AddressTable*> table{nullptr};
    std::vector<const AddressTable*> retired;  // guarded by blocks::mutex
    std::atomic<bool> stale{false};            // mappings have changed since the table was made

    uint64_t newest = 0;  // block that existed when the board came, or was handed out since
    std::atomic<uint64_t> freed_bytes[board::kMaxDevices] = {};  // of blocks up to that one

    // The thread that marks finished copies.
    pthread_t thread{};
    bool has_thread = false;
    std::atomic<bool> stopping{false};
    Word enqueued{0};  // a futex word: counts batches of copies

    Session() = default;
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    Shadows* shadows_of(const TrackedBlock& block) const {
        return block.device < 0 || block.device >= static_cast<int>(board::kMaxDevices)
                   ? nullptr
                   : shadows[block.device].get();
    }
    TrackedBlock* find(uint64_t block_id);
    void renew_table();  // this and the next need blocks::mutex
    void drop_retired();
    void watch_copies();  // call it after new copies
};

// Begins to read. Null if there is no session; do not call end_reading() then.
Session* begin_reading();
void end_reading();
uint32_t readers();

class Reader {
  public:
    Reader() : session_(begin_reading()) {}
    ~Reader() {
        if (session_) end_reading();
    }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    Session* operator->() const { return session_; }
    Session& operator*() const { return *session_; }
    explicit operator bool() const { return session_ != nullptr; }

  private:
    Session* const session_;
};

// The requests of a client. The first needs a closed gate. A board that is only watched arms
// nothing.
// The board's descriptor, then those of the slabs; they stay the caller's.
Outcome arm(int client, const std::vector<int>& descriptors);
Outcome disarm();
Outcome forget();

// Ends the job early, for whatever reason: nothing is predicted any more. The slabs are released by
// tidy(), which the hook's thread calls from time to time.
void give_up(const char* why);
void client_lost(int client);
void tidy();
void abandon();  // in a child after fork

}  // namespace phos::cow
