// The operations that streams run, apart from kernel launches (launch.h).
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/event.h"
#include "core/stream.h"

namespace phos::softgpu {

class Nothing final : public Work {
  public:
    CUresult run(Context&) const override { return CUDA_SUCCESS; }
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_EMPTY; }
    bool always() const override { return true; }
};

// One side of a copy: `device` addresses are checked, host addresses are the program's own.
struct End {
    uint64_t address = 0;
    bool device = false;
    size_t pitch = 0;   // bytes from row to row
    size_t height = 0;  // rows from slice to slice
};

// width bytes x rows x slices.
class Copy final : public Work {
  public:
    Copy(End to, End from, size_t width, size_t rows = 1, size_t slices = 1)
        : to_(to), from_(from), width_(width), rows_(rows), slices_(slices) {}
    // Copies from a snapshot of the host's bytes: the caller may change them at once.
    Copy(End to, std::vector<std::byte> bytes)
        : to_(to), width_(bytes.size()), snapshot_(std::move(bytes)) {}
    CUresult run(Context& context) const override;
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_MEMCPY; }
    const End& to() const { return to_; }
    const End& from() const { return from_; }
    size_t width() const { return width_; }
    size_t rows() const { return rows_; }
    size_t slices() const { return slices_; }

  private:
    End to_, from_;
    size_t width_, rows_ = 1, slices_ = 1;
    std::vector<std::byte> snapshot_;
};

// `width` elements of `element` bytes a row.
class Fill final : public Work {
  public:
    Fill(uint64_t address, uint32_t value, unsigned element, size_t width, size_t rows = 1,
         size_t pitch = 0)
        : address_(address),
          value_(value),
          element_(element),
          width_(width),
          rows_(rows),
          pitch_(pitch) {}
    CUresult run(Context& context) const override;
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_MEMSET; }
    CUDA_MEMSET_NODE_PARAMS description() const {
        return {address_, pitch_, value_, element_, width_, rows_};
    }

  private:
    uint64_t address_;
    uint32_t value_;
    unsigned element_;
    size_t width_, rows_, pitch_;
};

class HostCall final : public Work {
  public:
    HostCall(CUhostFn function, void* data) : function_(function), data_(data) {}
    CUresult run(Context& context) const override;
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_HOST; }
    CUDA_HOST_NODE_PARAMS description() const { return {function_, data_}; }

  private:
    CUhostFn function_;
    void* data_;
};

class StreamCallback final : public Work {
  public:
    StreamCallback(CUstreamCallback function, CUstream stream, void* data)
        : function_(function), stream_(stream), data_(data) {}
    CUresult run(Context& context) const override;
    bool always() const override { return true; }

  private:
    CUstreamCallback function_;
    CUstream stream_;
    void* data_;
};

class RecordEvent final : public Work {
  public:
    explicit RecordEvent(std::shared_ptr<Event::Record> record) : record_(std::move(record)) {}
    CUresult run(Context& context) const override;
    bool always() const override { return true; }

  private:
    std::shared_ptr<Event::Record> record_;
};

// cuStreamWaitValue, cuStreamWriteValue, and batches of them, which run in their order.
class ValueOperations final : public Work {
  public:
    explicit ValueOperations(std::vector<CUstreamBatchMemOpParams> operations)
        : operations_(std::move(operations)) {}
    CUresult run(Context& context) const override;
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; }
    const std::vector<CUstreamBatchMemOpParams>& operations() const { return operations_; }

  private:
    std::vector<CUstreamBatchMemOpParams> operations_;
};

}  // namespace phos::softgpu
