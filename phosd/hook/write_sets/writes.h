// Predict what a submission may write from its arguments. hooks.def names a rule for each function;
// the rules for copies and fills are here, those for kernels in launches.h, those for graphs in
// graphs.h.
//
// If a call has exact addresses, exactly those are predicted. A destination counts by its address
// alone, whatever type the call gives it: under unified addressing a host pointer can be device
// memory. Arrays, and memory allocated by graphs, belong to the driver and are ignored.
#pragma once

#include <tuple>
#include <type_traits>

#include "base/process.h"
#include "cow/cow.h"

namespace phos::write_sets {

// Collects what a submission may write, for copy-on-write.
class Prediction {
  public:
    explicit Prediction(const cow::Where& where) : where_(where) {}

    void bytes(uint64_t address, uint64_t count) {
        const uint64_t end = address + count;
        if (count) add({address, end > address ? end : ~0ull});
    }
    // Predicts that the work may write anywhere in the memory that `address` can reach.
    void reach(uint64_t address) {
        // What only some bytes of were predicted does not count.
        for (const cow::Range& known : extents_)
            if (address - known.begin < known.end - known.begin) return;
        cow::Range extent{};
        if (!cow::extent_of(address, &extent)) return;
        extents_[extent_count_++ % kRecent] = extent;
        add(extent);
    }
    void everything() { everything_ = true; }

    void finish() {
        if (everything_)
            cow::before_writing_everything(where_);
        else if (count_)
            cow::before_write(ranges_, count_, where_);
    }

  private:
    static constexpr size_t kRanges = 64;
    static constexpr size_t kRecent = 8;

    void add(const cow::Range& range) {
        if (count_ == kRanges) {
            cow::before_write(ranges_, count_, where_);
            count_ = 0;
        }
        ranges_[count_++] = range;
    }

    const cow::Where where_;
    bool everything_ = false;
    size_t count_ = 0;
    cow::Range ranges_[kRanges];
    size_t extent_count_ = 0;
    cow::Range extents_[kRecent] = {};  // the last ones that were reached
};

// Rows of `width` bytes, `pitch` bytes apart; layers of `height` rows, `layer` rows apart.
struct Box {
    uint64_t begin;
    uint64_t width;
    uint64_t pitch;
    uint64_t height = 1;
    uint64_t layer = 1;
    uint64_t depth = 1;
};
// Returns the range from the first byte to the last; bytes between rows count as written. Empty if
// the box is; up to the end of all addresses if the sizes are invalid.
cow::Range span_of(const Box& box);

// Returns the destination of a copy in two or three dimensions; empty for an array.
cow::Range destination_of(const CUDA_MEMCPY2D_v2& copy);
cow::Range destination_of(const CUDA_MEMCPY3D_v2& copy);
cow::Range destination_of(const CUDA_MEMCPY3D_PEER& copy);
cow::Range destination_of(const CUDA_MEMSET_NODE_PARAMS& fill);
// Sets the range that a stream memory operation writes; empty if none. False if it is unknown.
bool destination_of(const CUstreamBatchMemOpParams& operation, cow::Range* written);

template <class Pointer>
uint64_t address_of(Pointer pointer) {
    if constexpr (std::is_pointer_v<Pointer>)
        return reinterpret_cast<uint64_t>(pointer);
    else
        return pointer;
}

// For functions with the destination first, and the number of bytes in argument `Count` (from 0).
template <size_t Count>
struct Copied {
    template <class Pointer, class... Rest>
    static void predict(Prediction& prediction, Pointer destination, Rest... rest) {
        prediction.bytes(address_of(destination), std::get<Count - 1>(std::tie(rest...)));
    }
};

template <class Copy>
struct CopiedBox {
    template <class... Rest>
    static void predict(Prediction& prediction, const Copy* copy, Rest...) {
        if (!copy) return;
        const cow::Range range = destination_of(*copy);
        prediction.bytes(range.begin, range.end - range.begin);
    }
};

struct Filled {
    template <class Value, class... Rest>
    static void predict(Prediction& prediction, CUdeviceptr destination, Value, size_t count,
                        Rest...) {
        prediction.bytes(destination, count * sizeof(Value));
    }
};

struct FilledRows {
    template <class Value, class... Rest>
    static void predict(Prediction& prediction, CUdeviceptr destination, size_t pitch, Value,
                        size_t width, size_t height, Rest...) {
        const cow::Range range =
            span_of({destination, width * sizeof(Value), pitch, height, height, 1});
        prediction.bytes(range.begin, range.end - range.begin);
    }
};

struct ValueWritten {
    template <class Value>
    static void predict(Prediction& prediction, CUstream, CUdeviceptr destination, Value,
                        unsigned) {
        prediction.bytes(destination, sizeof(Value));
    }
};

struct OperationBatch {
    static void predict(Prediction& prediction, CUstream, unsigned count,
                        const CUstreamBatchMemOpParams* operations, unsigned flags);
};

struct CopyBatch {
    template <class... Rest>
    static void predict(Prediction& prediction, const CUdeviceptr* destinations, const CUdeviceptr*,
                        const size_t* sizes, size_t count, Rest...) {
        for (size_t i = 0; destinations && sizes && i < count; ++i)
            prediction.bytes(destinations[i], sizes[i]);
    }
};

// Discarded memory may read as anything, so discarding is a write.
struct Discarded {
    template <class... Rest>
    static void predict(Prediction& prediction, const CUdeviceptr* addresses, const size_t* sizes,
                        size_t count, Rest...) {
        for (size_t i = 0; addresses && sizes && i < count; ++i)
            prediction.bytes(addresses[i], sizes[i]);
    }
};

struct BoxBatch {
    template <class... Rest>
    static void predict(Prediction& prediction, size_t count, const CUDA_MEMCPY3D_BATCH_OP* copies,
                        Rest...) {
        // Lengths are in elements of a size that is not among the arguments.
        for (size_t i = 0; copies && i < count; ++i)
            if (copies[i].dst.type == CU_MEMCPY_OPERAND_TYPE_POINTER)
                prediction.reach(copies[i].dst.op.ptr.ptr);
    }
};

struct Decompressed {
    template <class... Rest>
    static void predict(Prediction& prediction, const CUmemDecompressParams* streams, size_t count,
                        Rest...) {
        for (size_t i = 0; streams && i < count; ++i) {
            prediction.reach(address_of(streams[i].dst));  // its size is only a hint
            prediction.bytes(address_of(streams[i].dstActBytes), sizeof(cuuint32_t));
        }
    }
};

struct Everything {
    template <class... Arguments>
    static void predict(Prediction& prediction, Arguments...) {
        prediction.everything();
    }
};

// Returns whether the work is only captured, and does not run now.
bool is_captured(const cow::Where& where);

template <class Argument>
constexpr bool kTellsStream =
    std::is_same_v<Argument, CUstream> || std::is_same_v<Argument, const CUlaunchConfig*>;

inline void take_stream(CUstream* stream, CUstream argument) {
    *stream = argument;
}
inline void take_stream(CUstream* stream, const CUlaunchConfig* config) {
    if (config) *stream = config->hStream;
}
template <class Other>
std::enable_if_t<!kTellsStream<Other>> take_stream(CUstream*, const Other&) {}

// Called after passing the gate, before the driver gets the same arguments.
template <class Rule, class... Arguments>
__attribute__((noinline)) void before(bool per_thread, Arguments... arguments) {
    const KeepErrno keep;
    cow::Where where{nullptr, per_thread, !(kTellsStream<Arguments> || ...)};
    (take_stream(&where.stream, arguments), ...);
    if (is_captured(where)) return;
    const cow::SubmissionScope scope;
    Prediction prediction(where);
    Rule::predict(prediction, arguments...);
    prediction.finish();
}

}  // namespace phos::write_sets
