// Copy-on-write while a board is armed: what submissions ask for before the driver gets them.
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

// Where the work of a submission runs.
struct Where {
    CUstream stream;
    bool per_thread;   // stream 0 is the thread's own
    bool synchronous;  // the call has no stream, and returns when its work is done
};

// Held, past the gate, for as long as a submission is looked at, its waits included: counts it, and
// keeps what extent_of() reads.
class SubmissionScope {
  public:
    SubmissionScope();
    ~SubmissionScope();
    SubmissionScope(const SubmissionScope&) = delete;
    SubmissionScope& operator=(const SubmissionScope&) = delete;

  private:
    uint64_t began_;
};

// What a pointer to `address` reaches: the mapping that holds it, and those of the program's own
// that adjoin it, for an allocation may lie across them (PyTorch's expandable segments). False when
// no block of the board is there, or none with a chunk that is not saved: nothing is to be done.
// An address just past a mapping is no address of it. Takes no lock.
bool extent_of(uint64_t address, Range* extent);

// Called with the gate passed, before the driver's function. Makes every pending chunk that the
// ranges touch safe, and `where` wait for shadows that are still being made. Any addresses are
// fine.
void before_write(const Range* ranges, size_t count, const Where& where);
void before_writing_everything(const Where& where);

}  // namespace phos::cow
