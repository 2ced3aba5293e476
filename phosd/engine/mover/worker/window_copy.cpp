#include "window_copy.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

namespace phos::mover {

namespace {

// What both directions share. The first failure is the outcome, and ends the work.
class Copier {
  public:
    Copier(const Functions& driver, CUstream stream, const Windows& windows, const File& file)
        : driver_(driver), stream_(stream), windows_(windows), file_(file) {}

  protected:
    bool ok() const { return outcome_.result == Result::kDone; }

    void fail(Result result, int code, uint64_t offset = 0) {
        if (ok()) outcome_ = {result, code, offset};
    }

    const Window& window(uint64_t turn) const { return windows_.windows[turn % windows_.count]; }

    void wait(const Window& window) {
        if (const CUresult code = driver_.synchronize(window.event))
            fail(Result::kSynchronize, code);
    }

    void record(const Window& window) {
        if (const CUresult code = driver_.record(window.event, stream_))
            fail(Result::kRecord, code);
    }

    Outcome finished() {
        for (uint32_t i = 0; i < windows_.count; ++i) wait(windows_.windows[i]);
        return outcome_;
    }

    // The bytes of the next transfer, of those that are left.
    uint64_t next(uint64_t left) {
        const uint64_t first = std::exchange(file_.first, 0);
        return first ? std::min(first, left) : left;
    }

    const Functions& driver_;
    const CUstream stream_;
    const Windows& windows_;
    File file_;
    Outcome outcome_ = {Result::kDone, 0, 0};
};

class In : Copier {
  public:
    explicit In(const CopyIn& request)
        : Copier(request.driver, request.stream, request.windows, request.file),
          request_(request) {}

    Outcome run() {
        const uint64_t most = request_.pinned ? request_.count : windows_.records;
        for (uint64_t at = 0, turn = 0; at < request_.count && ok(); at += most, ++turn)
            part(window(turn), request_.records + at, std::min(most, request_.count - at));
        return finished();
    }

  private:
    // Copies some records through a window, once the device has read what was there before.
    void part(const Window& window, const RecordIn* records, uint64_t count) {
        wait(window);
        const uint64_t first = records[0].offset;
        uint64_t size = 0;
        bool follow = true;
        for (uint64_t i = 0; i < count; ++i) {
            follow = follow && records[i].offset == first + size;
            size += kHeader + (records[i].length + kHeader - 1) / kHeader * kHeader;
        }
        const uint8_t* host = window.host;
        if (!follow || (request_.pinned == nullptr && size > windows_.records * kRecord)) {
            fail(Result::kError, EINVAL);
        } else if (request_.pinned == nullptr) {
            read(window.host, first, size);
        } else if (first > request_.size || size > request_.size - first) {
            fail(Result::kEnd, 0, request_.size);
        } else {
            host = request_.pinned + first;
        }
        for (uint64_t at = 0; at < count && ok();)
            at += copy(host - first, records + at, count - at);
        record(window);
    }

    void read(uint8_t* to, uint64_t offset, uint64_t size) {
        const bool direct = file_.direct >= 0 && !is_cached(to, offset);
        const int file = direct ? file_.direct : file_.buffered;
        for (uint64_t done = 0; done < size;) {
            const ssize_t count =
                pread(file, to + done, next(size - done), static_cast<off_t>(offset + done));
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) return fail(Result::kError, errno);
            if (count == 0) return fail(Result::kEnd, 0, offset + done);
            done += static_cast<uint64_t>(count);
        }
    }

    // Returns whether the first page is in the page cache, or the file system cannot tell.
    bool is_cached(uint8_t* to, uint64_t offset) const {
        const iovec page = {to, kHeader};
        const auto at = static_cast<off_t>(offset);
        const ssize_t count = preadv2(file_.buffered, &page, 1, at, RWF_NOWAIT);
        return count > 0 || (count < 0 && errno != EAGAIN);
    }

    // Starts copying the first records, as many as follow one another in device memory. Returns how
    // many these are. `pack` is where the pack would begin if all of it were there.
    uint64_t copy(const uint8_t* pack, const RecordIn* records, uint64_t count) {
        using board::kChunk;
        uint64_t rows = 1;
        while (rows < count && records[rows - 1].length == kChunk &&
               records[rows].length == kChunk &&
               records[rows].address == records[rows - 1].address + kChunk)
            ++rows;
        CUDA_MEMCPY2D copy = {};
        copy.srcMemoryType = CU_MEMORYTYPE_HOST;
        copy.srcHost = pack + records[0].offset + kHeader;
        copy.srcPitch = kRecord;
        copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = records[0].address;
        copy.dstPitch = kChunk;
        copy.WidthInBytes = records[0].length;
        copy.Height = rows;
        if (const CUresult code = driver_.copy_rows(&copy, stream_)) fail(Result::kCopyRows, code);
        return rows;
    }

    const CopyIn& request_;
};

class Out : Copier {
  public:
    explicit Out(const CopyOut& request)
        : Copier(request.driver, request.stream, request.windows, request.file),
          request_(request) {}

    Outcome run() {
        std::optional<Part> next = part(0, 0);
        for (uint64_t turn = 0; next && ok(); ++turn) {
            const Part now = *next;
            if (turn == 0 || windows_.count == 1) start(window(turn), now);
            next = part(now.first + now.records, now.offset + now.bytes);
            if (next && windows_.count > 1) start(window(turn + 1), *next);
            end(window(turn), now);
        }
        return finished();
    }

  private:
    // The records that go through a window together.
    struct Part {
        uint64_t first;
        uint64_t records;
        uint64_t offset;  // from that of the first record of all
        uint64_t bytes;
    };

    std::optional<Part> part(uint64_t first, uint64_t offset) const {
        if (first == request_.count) return std::nullopt;
        Part part = {first, std::min<uint64_t>(windows_.records, request_.count - first), offset,
                     0};
        for (uint64_t i = 0; i < part.records; ++i) part.bytes += request_.sizes[first + i];
        return part;
    }

    // Has the device copy records to a window, of which all has been written.
    void start(const Window& window, const Part& part) {
        if (part.bytes > windows_.records * kRecord) return fail(Result::kError, EINVAL);
        const uint64_t from = request_.address + part.offset;
        if (const CUresult code = driver_.copy_out(window.host, from, part.bytes, stream_))
            fail(Result::kCopyOut, code);
        record(window);
    }

    // Writes them with their headers, once the device has copied them.
    void end(const Window& window, const Part& part) {
        wait(window);
        uint8_t* header = window.host;
        for (uint64_t i = part.first; i < part.first + part.records; ++i) {
            const uint64_t fields = request_.field_bytes;
            std::memcpy(header, request_.fields + i * fields, fields);
            std::memset(header + fields, 0, kHeader - fields);
            header += request_.sizes[i];
        }
        write(window.host, request_.offset + part.offset, part.bytes);
    }

    void write(const uint8_t* from, uint64_t offset, uint64_t size) {
        const int file = file_.direct >= 0 ? file_.direct : file_.buffered;
        for (uint64_t done = 0; done < size && ok();) {
            const ssize_t count =
                pwrite(file, from + done, next(size - done), static_cast<off_t>(offset + done));
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) return fail(Result::kError, errno);
            done += static_cast<uint64_t>(count);
        }
    }

    const CopyOut& request_;
};

}  // namespace

Outcome copy_in(const CopyIn& request) {
    return In(request).run();
}

Outcome copy_out(const CopyOut& request) {
    return Out(request).run();
}

}  // namespace phos::mover

// What phosd/engine/mover/worker/window_copy.py calls.
PHOS_EXPORT void phos_copy_in(const phos::mover::CopyIn* request, phos::mover::Outcome* outcome) {
    *outcome = phos::mover::copy_in(*request);
}

PHOS_EXPORT void phos_copy_out(const phos::mover::CopyOut* request, phos::mover::Outcome* outcome) {
    *outcome = phos::mover::copy_out(*request);
}
