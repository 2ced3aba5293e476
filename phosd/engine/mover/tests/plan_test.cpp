// Programs that write all the time, and a mover that saves what they had before: with threads on
// one board each, without a device. Memory is ordinary; of each chunk only the first word is used.
// A writer reads and writes without locks, as a GPU does, so that the thread sanitizer sees whether
// the words of the board order the copies.
#include "../worker/plan.h"

#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "check.h"

namespace {

using namespace phos::mover;
using phos::board::kChunk;
using phos::board::kSlotShift;
using phos::board::kStateMask;
using phos::board::kUrgent;
using phos::board::State;

constexpr uint32_t kBlocks = 6;
constexpr uint32_t kChunksOfBlock = 20;
constexpr uint32_t kChunks = kBlocks * kChunksOfBlock;
constexpr uint32_t kBatches = 6;
constexpr uint32_t kMost = 4;
constexpr int kRounds = 20;

// Address space for chunks; only what is touched takes memory.
struct Memory {
    explicit Memory(uint32_t chunks) : size(chunks * kChunk) {
        constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, kFlags, -1, 0);
        CHECK(found != MAP_FAILED);
        address = reinterpret_cast<uint64_t>(found);
    }
    ~Memory() { munmap(reinterpret_cast<void*>(address), size); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint64_t& at(uint32_t chunk) { return *reinterpret_cast<uint64_t*>(address + chunk * kChunk); }

    uint64_t address = 0;
    size_t size;
};

uint64_t content(uint32_t board, uint32_t chunk) {
    return uint64_t{board} << 32 | chunk;
}

// A program with its hook: several writers share the slots.
struct Program {
    Program(uint32_t number, uint32_t slots) : number(number), memory(kChunks), slab(slots + 1) {
        std::vector<phos::board::BlockRow> rows;
        for (uint32_t b = 0; b < kBlocks; ++b)
            rows.push_back({b + 1, b * kChunksOfBlock, kChunksOfBlock});
        phos::board::SlabRow slab_row{0, slots, {0}, 0};
        view.reset(View::create(rows, &slab_row, slots != 0, nullptr, 0, &descriptor));
        CHECK(view);
        for (uint32_t c = 0; c < kChunks; ++c) memory.at(c) = content(number, c);
        for (uint32_t s = 0; s < slots; ++s) free.push_back(s);
    }
    ~Program() { close(descriptor); }

    // What the hook does before a chunk is written.
    void make_safe(uint32_t chunk) {
        std::atomic<uint32_t>& word = view->word(chunk);
        while (true) {
            const uint32_t progressed = view->header().progressed.load();
            const uint32_t seen = word.load(std::memory_order_acquire);
            const uint32_t state = seen & kStateMask;
            if (state == State::saved || state == State::shadowed) return;
            if (state == State::pending && shadow(chunk)) return;
            word.fetch_or(kUrgent);
            view->header().posted.fetch_add(1);
            while (view->header().progressed.load() == progressed &&
                   (word.load(std::memory_order_acquire) & kStateMask) == state)
                std::this_thread::yield();
        }
    }

    bool shadow(uint32_t chunk) {
        const std::lock_guard lock(mutex);
        for (uint32_t& slot : used) {
            if ((view->word(slot >> 16).load(std::memory_order_acquire) & kStateMask) !=
                State::saved)
                continue;
            free.push_back(slot & 0xffff);
            std::swap(slot, used.back());
            used.pop_back();
            break;
        }
        if (free.empty()) return false;
        const uint32_t slot = free.back();
        std::atomic<uint32_t>& word = view->word(chunk);
        uint32_t seen = word.load();
        do {
            if ((seen & kStateMask) != State::pending) return false;
        } while (!word.compare_exchange_weak(seen, State::shadowing | slot << kSlotShift));
        free.pop_back();
        used.push_back(chunk << 16 | slot);
        slab.at(slot) = memory.at(chunk);
        seen = State::shadowing | slot << kSlotShift;
        word.compare_exchange_strong(seen, State::shadowed | slot << kSlotShift);
        return true;  // also when the mover has said meanwhile that nobody needs the chunk
    }

    // Writers write chunks of their own, so that only the board orders them and the mover.
    void write(uint32_t writer, uint32_t writers, unsigned seed) {
        std::mt19937 random(seed);
        while (!over.load()) {
            const uint32_t chunk = random() % (kChunks / writers) * writers + writer;
            make_safe(chunk);
            memory.at(chunk) = random();
        }
    }

    const uint32_t number;
    Memory memory, slab;
    std::unique_ptr<View> view;
    int descriptor = -1;
    std::atomic<bool> over{false};
    std::mutex mutex;
    std::vector<uint32_t> free, used;  // guarded by mutex
};

// The device: copies batches in order and calls the host function.
class Stream {
  public:
    explicit Stream(Plan& plan) : plan_(plan), thread_([this] { run(); }) {}
    ~Stream() {
        put(kBatches, {});
        thread_.join();
    }

    void put(uint32_t batch, std::vector<Claim> claims) {
        const std::lock_guard lock(mutex_);
        queue_.emplace_back(batch, std::move(claims));
        changed_.notify_all();
    }
    uint32_t take() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !free_.empty(); });
        const uint32_t batch = free_.back();
        free_.pop_back();
        return batch;
    }
    void give(uint32_t batch) {
        const std::lock_guard lock(mutex_);
        free_.push_back(batch);
        changed_.notify_all();
    }

    std::map<std::pair<uint32_t, uint32_t>, uint64_t> saved;  // after the end

  private:
    void run() {
        while (true) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return !queue_.empty(); });
            const auto [batch, claims] = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            if (batch == kBatches) return;
            for (const Claim& claim : claims) {
                const auto* from = reinterpret_cast<const uint64_t*>(claim.address);
                CHECK(saved.emplace(std::pair{claim.block, claim.index}, *from).second);
            }
            plan_.arrived(batch);
            give(batch);
        }
    }

    Plan& plan_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::pair<uint32_t, std::vector<Claim>>> queue_;
    std::vector<uint32_t> free_{0, 1, 2, 3, 4, 5};
    std::thread thread_;
};

void round(unsigned seed, uint32_t slots) {
    std::mt19937 random(seed);
    constexpr uint32_t kPrograms = 2;
    constexpr uint32_t kWriters = 2;
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<View*> views;
    std::vector<BlockIn> blocks;
    std::vector<SlabIn> slabs;
    for (uint32_t p = 0; p < kPrograms; ++p) {
        programs.push_back(std::make_unique<Program>(p, slots));
        views.push_back(programs[p]->view.get());  // the sanitizer knows words by their addresses
        for (uint32_t b = 0; b < kBlocks; ++b) {
            const uint64_t at = programs[p]->memory.address + b * kChunksOfBlock * kChunk;
            blocks.push_back({at, kChunksOfBlock * kChunk, p, b * kChunksOfBlock});
        }
        if (slots != 0) slabs.push_back({programs[p]->slab.address, p, 0, slots, 0});
    }
    std::vector<uint8_t> wanted(kPrograms * kChunks);
    std::vector<uint32_t> order(kPrograms * kChunks);
    for (size_t i = 0; i < wanted.size(); ++i) {
        wanted[i] = random() % 10 != 0;
        order[i] = random() % 3 == 0 ? 1 + random() % 50 : 0;
    }
    const uint32_t devices[kPrograms] = {0, 1};
    std::vector<std::thread> writers;
    for (auto& program : programs)
        for (uint32_t w = 0; w < kWriters; ++w)
            writers.emplace_back([&program, w, from = random()] {
                program->write(w, kWriters, static_cast<unsigned>(from));
            });

    Plan plan(views, devices, blocks.data(), static_cast<uint32_t>(blocks.size()), wanted.data(),
              order.data(), slabs.data(), static_cast<uint32_t>(slabs.size()), kBatches, 10.0);
    std::map<std::pair<uint32_t, uint32_t>, uint64_t> saved;
    {
        Stream stream(plan);
        Look look = plan.look();
        for (; look.left != 0; look = plan.look()) {
            CHECK(look.aborted == 0);
            const uint32_t batch = stream.take();
            std::vector<Claim> claims(kMost);
            claims.resize(plan.claim(batch, 1 + random() % kMost, claims.data()));
            if (claims.empty()) {
                stream.give(batch);
                plan.wait(0.0005);
            } else {
                stream.put(batch, std::move(claims));
            }
        }
        while (plan.look().on_the_way != 0) std::this_thread::yield();
        saved = stream.saved;
    }
    for (auto& program : programs) program->over = true;
    for (std::thread& writer : writers) writer.join();

    size_t expected = 0;
    for (uint32_t i = 0; i < wanted.size(); ++i) {
        const uint32_t p = i / kChunks;
        const auto found = saved.find({i / kChunksOfBlock, i % kChunksOfBlock});
        CHECK((found != saved.end()) == (wanted[i] != 0));
        expected += wanted[i];
        if (wanted[i] != 0) CHECK(found->second == content(p, i % kChunks));
        CHECK((views[p]->word(i % kChunks).load() & kStateMask) == State::saved);
    }
    CHECK(saved.size() == expected);
    CHECK(plan.saving().longest_ns >= plan.saving().median_ns);
}

}  // namespace

int main() {
    for (int i = 0; i < kRounds; ++i)
        for (const uint32_t slots : {0u, 1u, 8u, 200u}) round(static_cast<unsigned>(i), slots);
}
