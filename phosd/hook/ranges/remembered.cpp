#include "ranges/remembered.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

namespace phos::ranges {
namespace {

// Results of launches, by all that they depend on: the inputs are hashed, to 128 bits. Only
// inputs that the evaluation has read count: others are often what was left on a stack, in
// arrays for more dimensions than there are. Launches that are alike in all that it has read go the
// same way through it. Read without a lock: a reader that sees the sequence change has read a part
// of something else.
constexpr size_t kSets = 4096;  // a power of two
constexpr size_t kWays = 4;
constexpr size_t kKeyWords = 6;
constexpr size_t kRangeWords = 3;
constexpr size_t kFoundWords = 1 + Accesses::kMostOrigins + Accesses::kMostRanges * kRangeWords;

struct alignas(64) Slot {
    std::atomic<uint32_t> sequence;  // odd: it is being written
    std::atomic<uint64_t> words[kKeyWords + kFoundWords];
};
Slot slots[kSets][kWays];
size_t replaced = 0;  // guarded by the lock of whoever remembers

uint64_t folded(uint64_t one, uint64_t other) {
    const auto product = static_cast<unsigned __int128>(one) * other;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// What is remembered of a launch by some of its inputs.
class Memory {
  public:
    Memory(const summaries::Summary& summary, const Launch& launch,
           const summaries::InputSet& deciding) {
        key_[0] = reinterpret_cast<uint64_t>(&summary);
        for (size_t i = 0; i < 3; ++i)
            key_[1 + i] = uint64_t{launch.sizes[i]} << 32 | launch.sizes[3 + i];
        uint64_t one = 0x243F'6A88'85A3'08D3u;
        uint64_t other = 0x1319'8A2E'0370'7344u;
        for (size_t at = 0; at < std::size(deciding.words); ++at)
            for (uint64_t left = deciding.words[at]; left; left &= left - 1) {
                const auto i = 64 * at + static_cast<size_t>(__builtin_ctzll(left));
                one = folded(one ^ launch.inputs[i], 0x9E37'79B9'7F4A'7C15u) + i;
                other = folded(other ^ launch.inputs[i], 0xBF58'476D'1CE4'E5B9u) + i;
            }
        key_[4] = one;
        key_[5] = other;
        uint64_t hash = 0;
        for (const uint64_t word : key_) hash = folded(hash ^ word, 0x94D0'49BB'1331'11EBu);
        set_ = slots[hash & (kSets - 1)];
    }

    bool recall(Accesses* found) const {
        for (const Slot* one = set_; one != set_ + kWays; ++one)
            if (recall(*one, found)) return true;
        return false;
    }

    void remember(const Accesses& found) const {
        Slot* slot = &set_[replaced++ % kWays];
        for (Slot* one = set_ + kWays; one-- != set_;)
            if (!one->sequence.load(std::memory_order_relaxed)) slot = one;
        for (Slot* one = set_; one != set_ + kWays; ++one)
            if (has_key(*one)) slot = one;
        const uint32_t sequence = slot->sequence.load(std::memory_order_relaxed);
        slot->sequence.store(sequence + 1, std::memory_order_relaxed);
        for (size_t i = 0; i < kKeyWords; ++i) put(slot, i, key_[i]);
        size_t at = kKeyWords;
        put(slot, at++,
            found.unknown | found.anywhere << 8 | found.widened << 16 |
                uint64_t{found.range_count} << 24 | uint64_t{found.origin_count} << 32);
        for (uint32_t i = 0; i < found.origin_count; ++i)
            put(slot, at++, uint64_t{found.origins[i].input} << 32 | found.origins[i].use);
        at = kKeyWords + 1 + Accesses::kMostOrigins;
        for (uint32_t i = 0; i < found.range_count; ++i) {
            const Range& range = found.ranges[i];
            put(slot, at++, range.begin);
            put(slot, at++, range.length);
            put(slot, at++, uint64_t{range.base} << 32 | range.use);
        }
        slot->sequence.store(sequence + 2, std::memory_order_release);
    }

  private:
    bool has_key(const Slot& slot) const {
        for (size_t i = 0; i < kKeyWords; ++i)
            if (word(slot, i) != key_[i]) return false;
        return true;
    }

    bool recall(const Slot& slot, Accesses* found) const {
        const uint32_t sequence = slot.sequence.load(std::memory_order_acquire);
        if (sequence & 1) return false;
        if (!has_key(slot)) return false;
        size_t at = kKeyWords;
        const uint64_t head = word(slot, at++);
        found->unknown = head & table::kUses;
        found->anywhere = head >> 8 & table::kUses;
        found->widened = head >> 16 & table::kUses;
        found->range_count = std::min<uint32_t>(head >> 24 & 0xFF, Accesses::kMostRanges);
        found->origin_count = std::min<uint32_t>(head >> 32 & 0xFF, Accesses::kMostOrigins);
        for (uint32_t i = 0; i < found->origin_count; ++i) {
            const uint64_t packed = word(slot, at++);
            found->origins[i] = {static_cast<uint32_t>(packed >> 32),
                                 static_cast<uint32_t>(packed)};
        }
        at = kKeyWords + 1 + Accesses::kMostOrigins;
        for (uint32_t i = 0; i < found->range_count; ++i) {
            Range& range = found->ranges[i];
            range.begin = word(slot, at++);
            range.length = word(slot, at++);
            const uint64_t packed = word(slot, at++);
            range.base = static_cast<uint32_t>(packed >> 32);
            range.use = static_cast<uint32_t>(packed);
        }
        return slot.sequence.load(std::memory_order_relaxed) == sequence;
    }

    // In this order: the sequence is read again after the words, and written before them.
    static uint64_t word(const Slot& slot, size_t at) {
        return slot.words[at].load(std::memory_order_acquire);
    }
    static void put(Slot* slot, size_t at, uint64_t value) {
        slot->words[at].store(value, std::memory_order_release);
    }

    Slot* set_;
    uint64_t key_[kKeyWords];
};

// All inputs that may be read.
summaries::InputSet all_of(const summaries::Summary& summary) {
    summaries::InputSet all{};
    for (uint32_t i = 0; i < summary.view.body->compared; ++i) all.add(i);
    return all;
}

}  // namespace

bool recall(const summaries::Summary& summary, const Launch& launch, Accesses* found) {
    const summaries::Deciding& deciding = summary.deciding;
    const uint32_t count = deciding.count.load(std::memory_order_acquire);
    for (const summaries::InputSet* one = deciding.sets; one != deciding.sets + count; ++one)
        if (Memory(summary, launch, *one).recall(found)) return true;
    return Memory(summary, launch, all_of(summary)).recall(found);
}

void remember(const summaries::Summary& summary, const Launch& launch, const Accesses& found) {
    Memory(summary, launch, all_of(summary)).remember(found);
}

void remember(const summaries::Summary& summary, const Launch& launch, const Accesses& found,
              const summaries::InputSet& inputs) {
    summaries::Deciding& deciding = summary.deciding;
    const uint32_t count = deciding.count.load(std::memory_order_relaxed);
    uint32_t at = 0;
    while (at < count && std::memcmp(&deciding.sets[at], &inputs, sizeof inputs) != 0) ++at;
    if (at == summaries::Deciding::kMost) return remember(summary, launch, found);
    if (at == count) {
        deciding.sets[at] = inputs;
        deciding.count.store(count + 1, std::memory_order_release);
    }
    Memory(summary, launch, inputs).remember(found);
}

}  // namespace phos::ranges
