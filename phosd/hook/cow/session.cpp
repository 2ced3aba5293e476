#include "cow/session.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "base/faults.h"
#include "base/log.h"
#include "base/process.h"
#include "code/kernels.h"
#include "gate/gate.h"
#include "memory/blocks.h"

namespace phos::cow {

std::atomic<bool> armed{false};

namespace {

using wire::Status;

constexpr long kPause = 50'000;                // nanoseconds between two checks of a copy
constexpr uint64_t kPatience = 2'000'000'000;  // for readers to leave and copies to end
constexpr uint32_t kMaxSlots = 1u << (32 - board::kSlotShift);

std::mutex lifetime;  // guards creation and end of `current`, and what disarm() gives up
std::atomic<Session*> current{nullptr};
std::atomic<uint32_t> reading{0};
uint64_t shadowed_last = 0;  // by the previous session

// Waits until the condition is true. False at the deadline.
template <class Condition>
bool wait_until(Condition condition) {
    for (const uint64_t end = monotonic_ns() + kPatience; !condition(); pause_for(kPause))
        if (monotonic_ns() > end) return false;
    return true;
}

bool no_readers() {
    return readers() == 0;
}

bool all_copied(const Session& session) {
    bool all = true;
    for (const auto& shadows : session.shadows) {
        if (!shadows) continue;
        const std::lock_guard lock(shadows->mutex);
        all &= shadows->complete();
    }
    return all;
}

void* watch(void* argument) {
    prctl(PR_SET_NAME, "phos-shadows");
    gate::exempt_this_thread();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (driver.cuThreadExchangeStreamCaptureMode) driver.cuThreadExchangeStreamCaptureMode(&mode);
    Session& session = *static_cast<Session*>(argument);
    while (!session.stopping.load(std::memory_order_acquire)) {
        const uint32_t seen = session.enqueued.load(std::memory_order_acquire);
        if (!all_copied(session))
            pause_for(kPause);
        else
            syscall(SYS_futex, &session.enqueued, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, seen, nullptr,
                    nullptr, 0);
    }
    return nullptr;
}

bool start_thread(Session& session) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 18);
    session.has_thread = pthread_create(&session.thread, &attributes, watch, &session) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return session.has_thread;
}

// Compares the rows of the board with the blocks of the process; empty if they agree. Each row is
// read only once, as the program could change it.
std::string track_blocks(Session& session) {
    const MappedChunkMap& board = session.board;
    session.tracked = std::vector<TrackedBlock>(board.block_count);
    uint64_t last_id = 0;
    uint64_t chunks = 0;
    for (uint32_t i = 0; i < board.block_count; ++i) {
        const board::BlockRow row = board.blocks[i];
        const auto found = blocks::by_id.find(row.id);
        const std::string name = "block " + std::to_string(row.id);
        if (row.id <= last_id || row.first_chunk < chunks) return name + " is out of order";
        if (found == blocks::by_id.end() || found->second.foreign) return name + " is not there";
        const blocks::Block& block = found->second;
        if (row.chunk_count != (block.size + board::kChunk - 1) / board::kChunk)
            return name + " is of another size";
        last_id = row.id;
        chunks = static_cast<uint64_t>(row.first_chunk) + row.chunk_count;
        if (chunks > board.chunk_count) return name + " has more chunks than there are";
        TrackedBlock& tracked = session.tracked[i];
        tracked.id = row.id;
        tracked.size = block.size;
        tracked.first_chunk = row.first_chunk;
        tracked.chunks = row.chunk_count;
        tracked.device = block.device();
    }
    return {};
}

struct SlabPlan {
    int device;
    uint32_t slots;
};

// As above, for the slabs.
std::string plan_slabs(const MappedChunkMap& board, std::vector<SlabPlan>* plans) {
    uint64_t slots = 0;
    for (uint32_t i = 0; i < board.slab_count; ++i) {
        const SlabPlan plan{board.slabs[i].device, board.slabs[i].slots};
        if (plan.device < 0 || plan.device >= static_cast<int>(board::kMaxDevices) || !plan.slots)
            return "slab " + std::to_string(i) + " is of no device, or empty";
        slots += plan.slots;
        plans->push_back(plan);
    }
    if (slots != board.slot_count || slots > kMaxSlots)
        return "its slots are not those of its slabs";
    return {};
}

Outcome take_slabs(Session& session, const std::vector<SlabPlan>& plans,
                   const std::vector<int>& descriptors) {
    uint32_t first_slot = 0;
    for (uint32_t row = 0; row < plans.size(); ++row) {
        const auto [device, slots] = plans[row];
        auto& shadows = session.shadows[device];
        if (!shadows) shadows = std::make_unique<Shadows>(device, session.board);
        const std::lock_guard lock(shadows->mutex);
        const char* call = nullptr;
        const CUresult result =
            shadows->add_slab(row, first_slot, slots, descriptors[row + 1], &call);
        if (result != CUDA_SUCCESS)
            return {result == CUDA_ERROR_OUT_OF_MEMORY ? Status::out_of_memory : Status::driver, 0,
                    std::string(call) + " of a slab for shadows failed with " + error_name(result)};
        first_slot += slots;
    }
    for (const auto& shadows : session.shadows) {
        if (!shadows) continue;
        const std::lock_guard lock(shadows->mutex);
        shadows->ready();  // otherwise tried again when needed
    }
    return {};
}

uint64_t pending_chunks(const MappedChunkMap& board) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < board.chunk_count; ++i)
        count += state_of(board.words[i].load(std::memory_order_relaxed)) == board::pending;
    return count;
}

// Releases everything but the board. False if a thread is still reading.
bool stand_down(Session& session) {
    armed.store(false, std::memory_order_seq_cst);
    session.board.wake_waiters();
    if (!wait_until(no_readers) || !wait_until([&] { return all_copied(session); })) return false;
    if (session.has_thread) {
        session.stopping.store(true, std::memory_order_release);
        session.watch_copies();
        pthread_join(session.thread, nullptr);
        session.has_thread = false;
    }
    for (auto& shadows : session.shadows) {
        if (!shadows) continue;
        const std::lock_guard lock(shadows->mutex);
        shadows->release();
    }
    session.board.post();
    shadowed_last = session.board.header->shadowed_chunks.load(std::memory_order_relaxed);
    return true;
}

bool end_session() {
    Session* const session = current.load(std::memory_order_acquire);
    if (!session) return true;
    if (!stand_down(*session)) return false;
    current.store(nullptr, std::memory_order_seq_cst);
    if (!wait_until(no_readers)) {
        current.store(session, std::memory_order_seq_cst);
        return false;
    }
    delete session;
    return true;
}

const Outcome kBusy{Status::busy, 0,
                    "threads of the program are still at work on the board; try again"};

}  // namespace

Session::~Session() {
    for (auto& device : shadows)
        if (device) device->release();
    drop_retired();
    delete table.load();
    board.unmap();
}

void Session::watch_copies() {
    enqueued.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &enqueued, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, nullptr, nullptr, 0);
}

Session* begin_reading() {
    // Readers are awaited only after `current` or `armed` has changed; the order of the two lets
    // one side see the other.
    reading.fetch_add(1, std::memory_order_seq_cst);
    Session* const session = current.load(std::memory_order_seq_cst);
    if (!session) end_reading();
    return session;
}

void end_reading() {
    reading.fetch_sub(1, std::memory_order_release);
}

uint32_t readers() {
    return reading.load(std::memory_order_seq_cst);
}

Outcome arm(int client, const std::vector<int>& descriptors) {
    const std::lock_guard turn(lifetime);
    if (armed.load()) return {Status::wrong_state, 0, "a board is armed already; disarm it first"};
    if (!end_session()) return kBusy;
    if (descriptors.empty()) return {Status::bad_message, 0, "the board's descriptor is missing"};
    auto session = std::make_unique<Session>();
    const std::string wrong = session->board.map(descriptors[0]);
    if (!wrong.empty()) return {Status::bad_message, 0, "not a board: " + wrong};
    const uint32_t phase = session->board.header->phase.load(std::memory_order_acquire);
    if (phase != board::armed && phase != board::watched)
        return {Status::bad_message, 0, "the board's job is over already"};
    if (phase == board::armed && gate::state() != wire::State::closed)
        return {Status::wrong_state, 0, "copy-on-write begins with a closed gate"};
    if (descriptors.size() - 1 != session->board.slab_count)
        return {Status::bad_message, 0, "the slabs and the descriptors are not of one number"};
    std::vector<SlabPlan> plans;
    std::string unfit = plan_slabs(session->board, &plans);
    const std::lock_guard lock(blocks::mutex);
    if (unfit.empty()) unfit = track_blocks(*session);
    if (!unfit.empty()) return {Status::bad_message, 0, "not a board: " + unfit};
    Outcome taken = take_slabs(*session, plans, descriptors);
    if (taken.status != Status::ok) return taken;
    session->renew_table();
    session->newest = blocks::last_id;
    session->client = client;
    if (phase == board::armed) {
        if (!start_thread(*session))
            return {Status::driver, 0, "no thread could be started to watch over shadows"};
        kernels::arm(session->board.kernels, session->board.kernel_count);
    }
    Outcome outcome;
    outcome.count = pending_chunks(session->board);
    current.store(session.release(), std::memory_order_seq_cst);
    armed.store(phase == board::armed, std::memory_order_seq_cst);
    return outcome;
}

Outcome disarm() {
    const std::lock_guard turn(lifetime);
    Session* const session = current.load(std::memory_order_acquire);
    if (session && (faults::point(faults::Point::disarm) != CUDA_SUCCESS || !stand_down(*session)))
        return kBusy;
    Outcome outcome;
    outcome.count = shadowed_last;
    return outcome;
}

Outcome forget() {
    const std::lock_guard turn(lifetime);
    return end_session() ? Outcome{} : kBusy;
}

void give_up(const char* why) {
    const Reader session;
    if (!session || !armed.load()) return;
    log::note("copy-on-write is given up: %s", why);
    session->board.abort();
    armed.store(false, std::memory_order_seq_cst);
    session->board.wake_waiters();
}

void client_lost(int client) {
    bool mine = false;
    if (const Reader session; session) mine = session->client == client && armed.load();
    if (!mine) return;
    give_up("its client was lost");
    forget();
}

void tidy() {
    bool over = false;
    if (const Reader session; session)
        over = session->has_thread &&
               session->board.header->phase.load(std::memory_order_acquire) == board::aborted;
    if (over) disarm();
}

void abandon() {
    armed.store(false, std::memory_order_relaxed);
    current.store(nullptr, std::memory_order_relaxed);
}

}  // namespace phos::cow
