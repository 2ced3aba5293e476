// What each rule predicts, told from the arguments of a call alone: nothing else of the hook is
// here. Kernels and graphs are tested with real ones, in tests/native/hook/test_writes.py.
#include "write_sets/writes.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "check.h"
#include "memory/contexts.h"

namespace phos {

Driver driver;

namespace {
using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;
Ranges predicted;
bool everything = false;
bool capturing = false;
cow::Where last_where{};
size_t calls = 0;

constexpr uint64_t kBlock = 0x7000'0000'0000;  // one block, of 1 MiB
constexpr uint64_t kBlockEnd = kBlock + (1 << 20);
}  // namespace

namespace cow {
SubmissionScope::SubmissionScope() : began_(0) {}
SubmissionScope::~SubmissionScope() {
    static_cast<void>(began_);
}
bool extent_of(uint64_t address, Range* extent) {
    *extent = {kBlock, kBlockEnd};
    return address >= kBlock && address < kBlockEnd;
}
void before_write(const Range* ranges, size_t count, const Where& where) {
    last_where = where;
    ++calls;
    for (size_t i = 0; i < count; ++i) predicted.emplace_back(ranges[i].begin, ranges[i].end);
}
void before_writing_everything(const Where& where) {
    last_where = where;
    everything = true;
}
}  // namespace cow

uint32_t contexts::captures() {
    return capturing;
}

namespace {

using namespace write_sets;

const auto kStream = reinterpret_cast<CUstream>(0x1234);

template <class Rule, class... Arguments>
Ranges predict(Arguments... arguments) {
    predicted.clear();
    everything = false;
    calls = 0;
    before<Rule>(false, arguments...);
    return predicted;
}

void copies_and_fills() {
    const CUdeviceptr at = kBlock + 5;
    const CUcontext context = nullptr;
    char host[8];
    const auto here = reinterpret_cast<uint64_t>(host);
    CHECK((predict<Copied<2>>(at, at + 100, size_t{10}) == Ranges{{at, at + 10}}));
    CHECK(
        (predict<Copied<2>>(static_cast<void*>(host), at, size_t{8}) == Ranges{{here, here + 8}}));
    CHECK(last_where.synchronous && !last_where.stream);
    CHECK((predict<Copied<4>>(at, context, at, context, size_t{10}, kStream) ==
           Ranges{{at, at + 10}}));
    CHECK(!last_where.synchronous && last_where.stream == kStream);
    CHECK((predict<Copied<3>>(at, CUarray{}, size_t{64}, size_t{10}) == Ranges{{at, at + 10}}));
    CHECK(predict<Copied<2>>(at, at, size_t{0}).empty() && calls == 0);
    CHECK((predict<Copied<2>>(at, at, ~size_t{0}) == Ranges{{at, ~0ull}}));
    CHECK(
        (predict<Filled>(at, static_cast<unsigned short>(7), size_t{10}) == Ranges{{at, at + 20}}));
    CHECK((predict<FilledRows>(at, size_t{512}, 7u, size_t{10}, size_t{3}, kStream) ==
           Ranges{{at, at + 2 * 512 + 40}}));
    CHECK(predict<FilledRows>(at, size_t{512}, 7u, size_t{10}, size_t{0}).empty());
    CHECK((predict<ValueWritten>(kStream, at, cuuint64_t{9}, 0u) == Ranges{{at, at + 8}}));
}

void boxes() {
    CUDA_MEMCPY2D_v2 flat{};
    flat.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    flat.dstDevice = kBlock;
    flat.dstPitch = 100;
    flat.dstXInBytes = 3;
    flat.dstY = 2;
    flat.WidthInBytes = 10;
    flat.Height = 4;
    using Flat = CopiedBox<CUDA_MEMCPY2D_v2>;
    CHECK((predict<Flat>(&flat) == Ranges{{kBlock + 203, kBlock + 203 + 310}}));
    flat.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    CHECK((predict<Flat>(&flat, kStream) == Ranges{{kBlock + 203, kBlock + 203 + 310}}));
    flat.dstPitch = 0;  // rows without a gap
    CHECK((predict<Flat>(&flat) == Ranges{{kBlock + 23, kBlock + 23 + 40}}));
    flat.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    CHECK(predict<Flat>(&flat).empty());
    CHECK(predict<Flat>(static_cast<const CUDA_MEMCPY2D_v2*>(nullptr)).empty());

    CUDA_MEMCPY3D_PEER deep{};
    deep.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    deep.dstDevice = kBlock;
    deep.dstPitch = 100;
    deep.dstHeight = 5;
    deep.dstZ = 1;
    deep.WidthInBytes = 10;
    deep.Height = 4;
    deep.Depth = 3;
    using Deep = CopiedBox<CUDA_MEMCPY3D_PEER>;
    const uint64_t begin = kBlock + 500;
    CHECK((predict<Deep>(&deep) == Ranges{{begin, begin + (2 * 5 + 3) * 100 + 10}}));
    deep.Depth = ~size_t{0} / 2;  // nonsense, which the driver refuses
    CHECK((predict<Deep>(&deep) == Ranges{{begin, ~0ull}}));
    CUDA_MEMCPY3D_v2 host{};
    char bytes[8];
    host.dstMemoryType = CU_MEMORYTYPE_HOST;
    host.dstHost = bytes;
    host.WidthInBytes = host.Height = host.Depth = 2;
    const auto here = reinterpret_cast<uint64_t>(bytes);
    CHECK((predict<CopiedBox<CUDA_MEMCPY3D_v2>>(&host) == Ranges{{here, here + 8}}));
}

void batches() {
    CUdeviceptr to[100];
    CUdeviceptr from[100];
    size_t sizes[100];
    Ranges expected;
    for (size_t i = 0; i < 100; ++i) {
        to[i] = kBlock + i * 1000;
        sizes[i] = i;
        if (i) expected.emplace_back(to[i], to[i] + i);
    }
    using Pointer = CUdeviceptr*;
    using Size = size_t*;
    CHECK(predict<CopyBatch>(Pointer{to}, Pointer{from}, Size{sizes}, size_t{100}, kStream) ==
          expected);
    CHECK(calls == 2);  // more than fit at once
    CHECK(predict<Discarded>(Pointer{to}, Size{sizes}, size_t{100}, 0ull, kStream) == expected);

    CUDA_MEMCPY3D_BATCH_OP boxes[2]{};
    boxes[0].dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    boxes[0].dst.op.ptr.ptr = kBlock + 7;
    boxes[1].dst.type = CU_MEMCPY_OPERAND_TYPE_ARRAY;
    using Boxes = CUDA_MEMCPY3D_BATCH_OP*;
    const Ranges block{{kBlock, kBlockEnd}};
    CHECK(predict<BoxBatch>(size_t{2}, Boxes{boxes}, 0ull, kStream) == block);

    cuuint32_t written = 0;
    const auto here = reinterpret_cast<uint64_t>(&written);
    CUmemDecompressParams stream{};
    stream.dst = reinterpret_cast<void*>(kBlock + 99);
    stream.dstNumBytes = 1;  // a hint
    stream.dstActBytes = &written;
    CHECK((predict<Decompressed>(&stream, size_t{1}, 0u, Size{nullptr}, kStream) ==
           Ranges{{kBlock, kBlockEnd}, {here, here + 4}}));

    CUstreamBatchMemOpParams operations[4]{};
    operations[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operations[0].waitValue.address = kBlock;
    operations[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operations[1].writeValue.address = kBlock + 4;
    operations[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operations[2].writeValue.address = kBlock + 16;
    operations[3].operation = CU_STREAM_MEM_OP_BARRIER;
    const CUstreamBatchMemOpParams* const first = operations;
    CHECK((predict<OperationBatch>(kStream, 4u, first, 0u) ==
           Ranges{{kBlock + 4, kBlock + 8}, {kBlock + 16, kBlock + 24}}));
    CHECK(!everything);
    const uint32_t newer = 99;
    std::memcpy(&operations[3].operation, &newer, sizeof newer);
    predict<OperationBatch>(kStream, 4u, first, 0u);
    CHECK(everything);
}

void addresses_reach_their_block() {
    const auto reach = [](std::initializer_list<uint64_t> addresses) {
        predicted.clear();
        Prediction prediction(cow::Where{});
        for (const uint64_t address : addresses) prediction.reach(address);
        prediction.finish();
        return predicted;
    };
    const Ranges block{{kBlock, kBlockEnd}};
    CHECK(reach({kBlock}) == block);
    CHECK(reach({kBlockEnd - 1, kBlock, kBlock + 77}) == block);  // once
    CHECK(reach({kBlockEnd}).empty());                            // the end of a range
    CHECK(reach({kBlock - 1, 0, 5, ~0ull}).empty());
    // Bytes of the block are not the block.
    predicted.clear();
    Prediction prediction(cow::Where{});
    prediction.bytes(kBlock, 4);
    prediction.reach(kBlock);
    prediction.finish();
    CHECK((predicted == Ranges{{kBlock, kBlock + 4}, {kBlock, kBlockEnd}}));
}

CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
CUresult answer = CUDA_SUCCESS;

void captured_work_writes_nothing_yet() {
    driver.cuStreamIsCapturing = [](CUstream, CUstreamCaptureStatus* found) {
        *found = status;
        return answer;
    };
    const CUdeviceptr at = kBlock;
    const auto copy = [&] { return predict<Copied<2>>(at, at, size_t{4}, kStream).size(); };
    status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    CHECK(copy() == 1);  // nobody captures: the stream is not asked
    capturing = true;
    CHECK(copy() == 0);
    status = CU_STREAM_CAPTURE_STATUS_NONE;
    CHECK(copy() == 1);
    answer = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    CHECK(copy() == 0);
    capturing = false;
}

}  // namespace
}  // namespace phos

int main() {
    phos::copies_and_fills();
    phos::boxes();
    phos::batches();
    phos::addresses_reach_their_block();
    phos::captured_work_writes_nothing_yet();
    std::puts("ok");
}
