// Copies between packs and the device through windows of pinned memory: the inner loop of what
// moves tens of GB. Here, and not in Python, where 16 threads waited for each other in every piece.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../chunk_map/view.h"

namespace phos::mover {

constexpr uint64_t kHeader = 4096;
constexpr uint64_t kRecord = kHeader + board::kChunk;

// Pinned memory that the device reads or writes while the processor is at another. The device is
// done with it after `event`.
struct Window {
    uint8_t* host;
    CUevent event;
};

// The windows of one thread, each for `records` records.
struct Windows {
    const Window* windows;
    uint32_t count;
    uint32_t records;
};

// The functions of the driver, which Python has loaded.
struct Functions {
    decltype(&cuMemcpy2DAsync) copy_rows;
    decltype(&cuMemcpyDtoHAsync) copy_out;
    decltype(&cuEventRecord) record;
    decltype(&cuEventSynchronize) synchronize;
};

// A pack. It is read through the page cache if its bytes are there, and otherwise, as it is
// written, by `direct`, if that is not negative. The first transfer moves `first` bytes at most, if
// not 0.
struct File {
    int32_t buffered;
    int32_t direct;
    uint64_t first;
};

// A record to copy in: where its chunk's bytes go, where it is in the pack, and how many bytes the
// chunk has.
struct RecordIn {
    uint64_t address;
    uint64_t offset;
    uint64_t length;
};

// Records that follow one another in the pack. If `pinned` is not null the pack is at that address,
// of `size` bytes, and the device reads it there.
struct CopyIn {
    Functions driver;
    CUstream stream;
    Windows windows;
    File file;
    const uint8_t* pinned;
    uint64_t size;
    const RecordIn* records;
    uint64_t count;
};

// Records that follow one another at a device address and, from `offset` on, in the pack, each of
// so many bytes. Their headers are not there: each begins with its part of `fields`, and the rest
// is zero.
struct CopyOut {
    Functions driver;
    CUstream stream;
    Windows windows;
    File file;
    uint64_t address;
    uint64_t offset;
    const uint64_t* sizes;
    uint64_t count;
    const uint8_t* fields;
    uint64_t field_bytes;
};

enum class Result : uint32_t {
    kDone,
    kEnd,       // the file ended at `offset`
    kError,     // reading or writing failed with errno `code`
    kCopyRows,  // these functions of the driver failed with `code`
    kCopyOut,
    kRecord,
    kSynchronize,
};

struct Outcome {
    Result result;
    int32_t code;
    uint64_t offset;
};

// Both return when the device is done with all windows, also if they failed.
Outcome copy_in(const CopyIn& request);
Outcome copy_out(const CopyOut& request);

}  // namespace phos::mover
