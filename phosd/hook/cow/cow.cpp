#include "cow/cow.h"

#include <algorithm>

#include "base/process.h"
#include "cow/session.h"
#include "memory/blocks.h"

namespace phos::cow {

namespace {

constexpr uint64_t kSpin = 20'000;              // nanoseconds, before a wait costs a system call
constexpr uint64_t kPatience = 10'000'000'000;  // without progress of the movers
constexpr long kPause = 20'000;

// The submission of the thread; scopes may be nested.
struct ThreadScope {
    uint32_t depth;
    Session* session;
    uint64_t waited;  // nanoseconds
};
__thread ThreadScope own_scope __attribute__((tls_model("initial-exec"))) = {0, nullptr, 0};

// Calls visit(block, first, last) for the chunks of the board that the ranges touch, counted within
// the block.
template <class Visit>
void each_span(const Session& session, const Range* ranges, size_t count, Visit visit) {
    const AddressTable& table = *session.table.load();
    for (const Range* range = ranges; range != ranges + count; ++range) {
        for (size_t i = table.at_or_after(range->begin);
             i < table.entries.size() && table.entries[i].begin < range->end; ++i) {
            const AddressTable::Entry& entry = table.entries[i];
            if (!entry.tracked || entry.tracked->done.load(std::memory_order_relaxed)) continue;
            const uint64_t begin = std::max(range->begin, entry.begin) - entry.begin + entry.offset;
            const uint64_t end = std::min(range->end, entry.end) - entry.begin + entry.offset;
            const auto last = static_cast<uint32_t>((end + board::kChunk - 1) / board::kChunk);
            visit(*entry.tracked, static_cast<uint32_t>(begin / board::kChunk),
                  std::min(last, entry.tracked->chunks));
        }
    }
}

// The result of a first check, which takes no lock.
struct Survey {
    uint32_t devices = 0;  // a bit for each device that needs work
    bool blocked = false;  // only a mover can make a chunk safe
};

// Makes chunks safe for one submission. `Spans` calls its argument for every span of them.
template <class Spans>
class Writer {
  public:
    Writer(Session& session, const Where& where, const Spans& spans)
        : session_(session), where_(where), spans_(spans) {}

    void run() {
        while (session_.board.is_armed()) {
            const uint32_t seen = session_.board.header->progressed.load(std::memory_order_acquire);
            const Survey found = survey();
            bool blocked = found.blocked;
            for (uint32_t device = 0; found.devices >> device; ++device)
                if (found.devices >> device & 1) blocked |= shadow(device);
            if (!blocked) break;
            session_.board.post();
            if (!wait(seen)) return;
        }
        for (uint32_t device = 0; device < board::kMaxDevices; ++device)
            if (batches_[device]) follow(*session_.shadows[device], batches_[device]);
    }

  private:
    Survey survey() {
        MappedChunkMap& board = session_.board;
        Survey found;
        spans_([&](TrackedBlock& block, uint32_t first, uint32_t last) {
            if (!block.mappings.load(std::memory_order_acquire)) return;
            const bool has_shadows = session_.shadows_of(block) != nullptr;
            bool safe = true;
            for (uint32_t i = first; i < last; ++i) {
                const uint32_t chunk = block.first_chunk + i;
                touch(board.touched[chunk]);
                const auto state = state_of(board.words[chunk].load(std::memory_order_acquire));
                if (state == board::saved || state == board::shadowed) continue;
                safe = false;
                if (has_shadows)
                    found.devices |= 1u << block.device;
                else
                    found.blocked |= board.ask_urgently(chunk);
            }
            if (safe && first == 0 && last == block.chunks)
                block.done.store(true, std::memory_order_relaxed);
        });
        return found;
    }

    void touch(Word& number) {
        if (number.load(std::memory_order_relaxed)) return;
        if (!touch_)
            touch_ = session_.board.header->touches.fetch_add(1, std::memory_order_relaxed) + 1;
        uint32_t untouched = 0;
        number.compare_exchange_strong(untouched, touch_, std::memory_order_relaxed);
    }

    bool shadow(uint32_t device) {
        const RelaxedCapture relaxed;
        Shadows& shadows = *session_.shadows[device];
        Pending pending;
        {
            const std::lock_guard lock(shadows.mutex);
            spans_([&](TrackedBlock& block, uint32_t first, uint32_t last) {
                if (block.device == static_cast<int>(device) &&
                    block.mappings.load(std::memory_order_acquire))
                    shadows.cover(block, first, last, &pending);
            });
            shadows.record(&pending);
        }
        session_.watch_copies();
        batches_[device] = std::max(batches_[device], pending.batch);
        return pending.blocked;
    }

    // Waits until the movers have progressed. False if waiting is no longer worthwhile.
    bool wait(uint32_t seen) {
        MappedChunkMap& board = session_.board;
        const Word& progressed = board.header->progressed;
        const uint64_t began = monotonic_ns();
        uint64_t now = began;
        bool over = false;
        while (!over && progressed.load(std::memory_order_acquire) == seen) {
            if (now - began > kSpin) board.wait_progress(seen);
            now = monotonic_ns();
            over = !board.is_armed() || !armed.load(std::memory_order_acquire);
            if (!over && now - began > patience(kPatience)) {
                give_up("no mover has made progress in time");
                over = true;
            }
        }
        now = monotonic_ns();
        own_scope.waited += now - began;
        board.header->waited_ns.fetch_add(now - began, std::memory_order_relaxed);
        if (!waited_) board.header->waits.fetch_add(1, std::memory_order_relaxed);
        waited_ = true;
        return !over;
    }

    // Lets the submission run after the copies.
    void follow(Shadows& shadows, uint64_t batch) {
        const RelaxedCapture relaxed;
        std::unique_lock lock(shadows.mutex);
        if (shadows.has_passed(batch)) return;
        const CUevent event = shadows.event_of(batch);
        if (event && !where_.synchronous) {
            const auto stream_wait = where_.per_thread && driver.cuStreamWaitEvent_ptsz
                                         ? driver.cuStreamWaitEvent_ptsz
                                         : driver.cuStreamWaitEvent;
            if (stream_wait(where_.stream, event, 0) == CUDA_SUCCESS) return;
        }
        while (!shadows.complete() && !shadows.has_passed(batch)) {
            lock.unlock();
            pause_for(kPause);
            lock.lock();
        }
    }

    Session& session_;
    const Where& where_;
    const Spans& spans_;
    uint64_t batches_[board::kMaxDevices] = {};
    uint32_t touch_ = 0;
    bool waited_ = false;
};

template <class Spans>
void make_safe(Session& session, const Where& where, const Spans& spans) {
    Writer<Spans>(session, where, spans).run();
}

}  // namespace

SubmissionScope::SubmissionScope() : began_(0) {
    if (own_scope.depth++) return;
    Session* session = begin_reading();
    if (session && !armed.load(std::memory_order_seq_cst)) {
        end_reading();
        session = nullptr;
    }
    own_scope.session = session;
    own_scope.waited = 0;
    if (!session) return;
    began_ = monotonic_ns();
    if (!session->stale.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(blocks::mutex);
    if (!session->stale.load(std::memory_order_relaxed)) return;
    session->renew_table();
    if (readers() == 1) session->drop_retired();  // new readers see the new table
}

SubmissionScope::~SubmissionScope() {
    if (--own_scope.depth || !own_scope.session) return;
    board::Header& header = *own_scope.session->board.header;
    header.submissions.fetch_add(1, std::memory_order_relaxed);
    const uint64_t took = monotonic_ns() - began_ - own_scope.waited;
    header.looked_ns.fetch_add(took, std::memory_order_relaxed);
    header.looks[board::look_bucket(took)].fetch_add(1, std::memory_order_relaxed);
    own_scope.session = nullptr;
    end_reading();
}

bool extent_of(uint64_t address, Range* extent) {
    if (!own_scope.session) return false;
    const AddressTable& table = *own_scope.session->table.load();
    const size_t index = table.at_or_after(address);
    if (index == table.entries.size() || table.entries[index].begin > address) return false;
    const AddressTable::Extent& found = table.extents[table.entries[index].extent];
    uint32_t undone = found.undone.load(std::memory_order_relaxed);
    while (undone < found.last &&
           (!table.entries[undone].tracked ||
            table.entries[undone].tracked->done.load(std::memory_order_relaxed)))
        ++undone;
    found.undone.store(undone, std::memory_order_relaxed);
    if (undone == found.last) return false;
    *extent = {table.entries[found.first].begin, table.entries[found.last - 1].end};
    return true;
}

void before_write(const Range* ranges, size_t count, const Where& where) {
    const SubmissionScope scope;
    Session* const session = own_scope.session;
    if (!session) return;
    make_safe(*session, where,
              [&](const auto& visit) { each_span(*session, ranges, count, visit); });
}

void before_writing_everything(const Where& where) {
    const SubmissionScope scope;
    Session* const session = own_scope.session;
    if (!session) return;
    session->board.header->conservative.fetch_add(1, std::memory_order_relaxed);
    make_safe(*session, where, [&](const auto& visit) {
        for (TrackedBlock& block : session->tracked)
            if (!block.done.load(std::memory_order_relaxed)) visit(block, 0, block.chunks);
    });
}

}  // namespace phos::cow
