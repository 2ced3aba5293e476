// Copy-on-write while a board is armed: save chunks before a submission that may write them reaches
// the driver.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/driver.h"
#include "cow/armed.h"

namespace phos::cow {

struct Range {
    uint64_t begin;
    uint64_t end;
};

// The stream on which the work of a submission runs.
struct Where {
    CUstream stream;
    bool per_thread;   // stream 0 is the thread's own
    bool synchronous;  // the call has no stream, and returns when its work is done
};

// Held, after passing the gate, while the writes of a submission are predicted and awaited: counts
// the submission, and keeps the tables that extent_of() reads.
class SubmissionScope {
  public:
    SubmissionScope();
    ~SubmissionScope();
    SubmissionScope(const SubmissionScope&) = delete;
    SubmissionScope& operator=(const SubmissionScope&) = delete;

  private:
    uint64_t began_;
};

// Returns the memory that a pointer to `address` can reach: the mapping that contains it, and the
// program's own mappings that adjoin it, since an allocation may span them (PyTorch's expandable
// segments). False if there is no block of the board there, or none with a chunk that is not saved.
// The address just past a mapping does not belong to it. Takes no lock.
bool extent_of(uint64_t address, Range* extent);

// Makes every pending chunk that the ranges touch safe, and lets `where` wait for unfinished
// shadows. Called after passing the gate, before the driver's function. Any addresses are fine.
void before_write(const Range* ranges, size_t count, const Where& where);
void before_writing_everything(const Where& where);

}  // namespace phos::cow
