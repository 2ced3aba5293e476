// Copies through windows, with a driver that does everything as late as it may: a copy happens when
// somebody waits for an event that was recorded behind it. Whoever touches a window too early is
// found.
#include "../worker/window_copy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "check.h"

namespace {

using namespace phos::mover;
using phos::board::kChunk;

std::deque<std::function<void()>> queue;
uint64_t begun = 0;
uint64_t done = 0;
std::map<CUevent, uint64_t> recorded;
CUresult answer = CUDA_SUCCESS;

CUresult CUDAAPI copy_rows(const CUDA_MEMCPY2D* copy, CUstream) {
    const CUDA_MEMCPY2D c = *copy;
    ++begun;
    queue.push_back([c] {
        for (size_t row = 0; row < c.Height; ++row)
            std::memcpy(reinterpret_cast<uint8_t*>(c.dstDevice) + row * c.dstPitch,
                        static_cast<const uint8_t*>(c.srcHost) + row * c.srcPitch, c.WidthInBytes);
    });
    return answer;
}

CUresult CUDAAPI copy_out_(void* to, CUdeviceptr from, size_t size, CUstream) {
    ++begun;
    queue.push_back([=] { std::memcpy(to, reinterpret_cast<const void*>(from), size); });
    return answer;
}

CUresult CUDAAPI record(CUevent event, CUstream) {
    recorded[event] = begun;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI synchronize(CUevent event) {
    for (; done < recorded[event]; ++done) {
        queue.front()();
        queue.pop_front();
    }
    return CUDA_SUCCESS;
}

constexpr Functions kDriver = {copy_rows, copy_out_, record, synchronize};
constexpr uint64_t kFields = 96;

// Fills memory with bytes that are nowhere the same again.
void fill(uint8_t* memory, uint64_t length) {
    static uint64_t state = 1;
    for (uint64_t i = 0; i < length; i += sizeof state) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::memcpy(memory + i, &state, std::min(length - i, sizeof state));
    }
}

struct Pack {
    explicit Pack(const std::vector<uint64_t>& lengths) : file(memfd_create("pack", 0)) {
        CHECK(file >= 0);
        for (const uint64_t length : lengths) {
            offsets.push_back(bytes.size());
            sizes.push_back(kHeader + (length + kHeader - 1) / kHeader * kHeader);
            bytes.resize(bytes.size() + sizes.back());
            uint8_t* const record = &bytes[offsets.back()];
            fill(record, kFields);
            fill(record + kHeader, length);
        }
        CHECK(pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    }
    ~Pack() { close(file); }
    int file;
    std::vector<uint8_t> bytes;
    std::vector<uint64_t> offsets;
    std::vector<uint64_t> sizes;
};

struct Place {
    explicit Place(uint32_t count, uint32_t records) : memory(count * records * kRecord) {
        for (uint32_t i = 0; i < count; ++i)
            windows.push_back({memory.data() + i * records * kRecord,
                               reinterpret_cast<CUevent>(static_cast<uintptr_t>(i + 1))});
        all = {windows.data(), count, records};
    }
    std::vector<uint8_t> memory;
    std::vector<Window> windows;
    Windows all;
};

const std::vector<uint64_t> kLengths = {kChunk, kChunk, 5000, kChunk, kChunk, kChunk, 4096, 1};

// Copies a pack in, to places in reverse order but for the fourth to sixth, which lie together.
void test_in(uint32_t count, uint32_t records, uint64_t first, bool pinned) {
    const Pack pack(kLengths);
    Place place(count, records);
    std::vector<uint8_t> device(kLengths.size() * kChunk);
    const auto at = reinterpret_cast<uint64_t>(device.data());
    const std::vector<uint64_t> slots = {7, 6, 5, 0, 1, 2, 4, 3};
    std::vector<RecordIn> rows;
    for (size_t i = 0; i < kLengths.size(); ++i)
        rows.push_back({at + slots[i] * kChunk, pack.offsets[i], kLengths[i]});
    CopyIn request = {kDriver, nullptr, place.all,   {pack.file, -1, first},
                      nullptr, 0,       rows.data(), rows.size()};
    if (pinned) {
        request.pinned = pack.bytes.data();
        request.size = pack.bytes.size();
    }
    CHECK(copy_in(request).result == Result::kDone);
    CHECK(queue.empty());
    for (size_t i = 0; i < kLengths.size(); ++i)
        CHECK(!std::memcmp(device.data() + slots[i] * kChunk,
                           pack.bytes.data() + pack.offsets[i] + kHeader, kLengths[i]));

    // A file that ends too early is told of; nothing is in flight afterwards.
    if (pinned) {
        request.size = pack.offsets[7];
        CHECK(copy_in(request).result == Result::kEnd && queue.empty());
        return;
    }
    CHECK(ftruncate(pack.file, static_cast<off_t>(pack.offsets[5] + 100)) == 0);
    const Outcome short_file = copy_in(request);
    CHECK(short_file.result == Result::kEnd && short_file.offset == pack.offsets[5] + 100);
    CHECK(queue.empty());
    rows[1].offset = 1ull << 40;  // these records do not follow one another
    if (records > 1) CHECK(copy_in(request).code == EINVAL && queue.empty());
}

void test_out(uint32_t count, uint32_t records, uint64_t first) {
    const Pack pack(kLengths);
    Place place(count, records);
    std::vector<uint8_t> device = pack.bytes;
    std::vector<uint8_t> fields;
    for (const uint64_t offset : pack.offsets) {
        fields.insert(fields.end(), &pack.bytes[offset], &pack.bytes[offset + kFields]);
        std::memset(device.data() + offset, 0xee, kHeader);
    }
    const int file = memfd_create("written", 0);
    CHECK(file >= 0);
    CopyOut request = {kDriver,
                       nullptr,
                       place.all,
                       {file, -1, first},
                       reinterpret_cast<uint64_t>(device.data()),
                       8192,
                       pack.sizes.data(),
                       pack.sizes.size(),
                       fields.data(),
                       kFields};
    CHECK(copy_out(request).result == Result::kDone);
    CHECK(queue.empty());
    std::vector<uint8_t> written(pack.bytes.size());
    CHECK(pread(file, written.data(), written.size(), 8192) ==
          static_cast<ssize_t>(written.size()));
    CHECK(written == pack.bytes);

    request.file.buffered = -1;
    const Outcome closed = copy_out(request);
    CHECK(closed.result == Result::kError && closed.code == EBADF && queue.empty());
    close(file);
}

void test_failing_driver() {
    const Pack pack(kLengths);
    Place place(2, 2);
    std::vector<uint8_t> device(kChunk);
    const RecordIn row = {reinterpret_cast<uint64_t>(device.data()), 0, kChunk};
    answer = CUDA_ERROR_ILLEGAL_ADDRESS;
    const Outcome outcome =
        copy_in({kDriver, nullptr, place.all, {pack.file, -1, 0}, nullptr, 0, &row, 1});
    answer = CUDA_SUCCESS;
    CHECK(outcome.result == Result::kCopyRows && outcome.code == CUDA_ERROR_ILLEGAL_ADDRESS);
}

}  // namespace

int main() {
    for (const uint32_t count : {1u, 2u})
        for (const uint32_t records : {1u, 2u, 3u})
            for (const uint64_t first : {0ull, 4096ull}) {
                test_in(count, records, first, false);
                test_in(count, records, first, true);
                test_out(count, records, first);
            }
    test_failing_driver();
}
