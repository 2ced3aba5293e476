#include "ranges/launch_ranges.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

namespace phos::ranges {
namespace {

using table::kNone;

constexpr uint32_t kMostCases = 32;
constexpr uint32_t kMostChoices = 256;
// Of one launch, some nanoseconds each, while it waits, and later. What is not computed by then is
// known by its origin alone.
constexpr uint32_t kStepsBefore = 2'000;
constexpr uint32_t kStepsLater = 32'000;
// No memory is mapped below it (vm.mmap_min_addr): such an input is no pointer.
constexpr uint64_t kLeastAddress = 1u << 16;

struct Evaluations {
    Evaluation of_others{nullptr};
    Evaluation one{&of_others};
};
std::mutex mutex;  // guards what is remembered, and the evaluations of launches

// They are large, and not touched in a process whose launches are not looked at.
Evaluation& evaluation_of_launches() {
    static Evaluations them;
    return them.one;
}
Evaluation& evaluation_of_thread() {  // the hook's
    static Evaluations them;
    return them.one;
}

void add_origin(uint32_t input, uint32_t use, Accesses* found) {
    uint32_t at = 0;
    while (at < found->origin_count && found->origins[at].input != input) ++at;
    if (at == Accesses::kMostOrigins) {
        found->unknown |= use & table::kUses;
        return;
    }
    if (at == found->origin_count) found->origins[found->origin_count++] = {input, 0};
    found->origins[at].use |= use;
}

// Where the address comes from, for an access of which that is all that is known.
void add_origins(const summaries::View& view, const table::Access& access, Accesses* found) {
    if (access.flags & table::kUnknownOrigin) found->unknown |= access.use;
    if (access.flags & table::kFromAnyWord) found->anywhere |= access.use;
    const uint32_t use = access.use | (access.origins.count == 1 ? Accesses::kAlone : 0);
    for (uint32_t i = 0; i < access.origins.count; ++i)
        add_origin(view.refs[access.origins.at + i], use, found);
}

// Evaluates accesses for a launch, one alternative after the other: those in a row that the same
// holds of at once, as are most of an unrolled loop.
class Search {
  public:
    Search(Evaluation* evaluation, const summaries::Summary& summary, const Launch& launch,
           Budget* budget, summaries::InputSet* deciding)
        : evaluation_(*evaluation),
          view_(summary.view),
          launch_(launch),
          budget_(budget),
          deciding_(deciding) {}

    // Adds where the accesses are, by their address or else by their origin. Returns the next one.
    const table::Access* run(const table::Access* first, Accesses* found) {
        const table::Access* const all = view_.accesses + view_.body->accesses;
        const table::Access* last = first + 1;
        while (last != all && is_alike(*first, *last)) ++last;
        const auto count = static_cast<size_t>(last - first);
        bool lost[table::kMaxAccesses];
        for (size_t i = 0; i < count; ++i) lost[i] = first[i].address == kNone;
        const bool is_split = split(*first);
        for (uint32_t one = 0; is_split && one < cases_ && budget_->left; ++one) {
            evaluation_.next();
            if (!assume(*first, one)) continue;
            for (size_t i = 0; i < count; ++i) lost[i] = lost[i] || !evaluate(first[i], found);
        }
        for (size_t i = 0; i < count; ++i)
            if (lost[i] || !is_split || !budget_->left) add_origins(view_, first[i], found);
        return last;
    }

  private:
    static bool is_alike(const table::Access& one, const table::Access& other) {
        return std::memcmp(&one.facts, &other.facts,
                           offsetof(table::Access, origins) - offsetof(table::Access, facts)) == 0;
    }

    // Chooses the alternatives; one that has all of them if there are too many.
    bool split(const table::Access& access) {
        evaluation_.begin(view_, launch_, budget_, deciding_);
        const uint32_t* const decided = view_.refs + access.decided.at;
        for (uint32_t i = 0; i < access.decided.count; i += 2)
            evaluation_.decide(decided[i], decided[i + 1]);
        cases_ = 1;
        if (access.choices.count > kMostChoices) return false;
        keys_ = access.choices.count;
        for (uint32_t i = 0; i < keys_; ++i) {
            places_[i] = evaluation_.places(view_.refs[access.choices.at + i]);
            if (!places_[i]) return false;
            cases_ *= static_cast<uint32_t>(__builtin_popcountll(places_[i]));
            if (cases_ > kMostCases) {
                cases_ = 1;
                keys_ = 0;
                break;
            }
        }
        of_choices_ = cases_;
        loops_ = 0;
        while (loops_ < access.loops.count && cases_ * 2 <= kMostCases) {
            cases_ *= 2;
            ++loops_;
        }
        return true;
    }

    // Notes what holds in a case. False if it cannot be.
    bool assume(const table::Access& access, uint32_t one) {
        uint32_t rest = one % of_choices_;
        const uint32_t iterations = one / of_choices_;
        uint32_t chosen[kMostChoices];
        for (uint32_t i = 0; i < keys_; ++i) {
            const auto count = static_cast<uint32_t>(__builtin_popcountll(places_[i]));
            uint64_t left = places_[i];
            for (uint32_t skip = rest % count; skip; --skip) left &= left - 1;
            rest /= count;
            chosen[i] = static_cast<uint32_t>(__builtin_ctzll(left));
            evaluation_.choose(view_.refs[access.choices.at + i], chosen[i]);
        }
        for (uint32_t i = 0; i < loops_; ++i)
            evaluation_.enter(view_.refs[access.loops.at + i], iterations >> i & 1);
        for (uint32_t i = 0; i < access.facts.count; ++i)
            evaluation_.constrain(view_.conditions[view_.refs[access.facts.at + i]], true);
        for (uint32_t i = 0; i < keys_; ++i) {
            const table::Key& key = view_.keys[view_.refs[access.choices.at + i]];
            if (key.kind == table::kIf)
                evaluation_.constrain(view_.conditions[key.at], chosen[i] == 0);
        }
        return evaluation_.state() == Evaluation::State::fine;
    }

    // Adds where an access is in this case; false if it is not known.
    bool evaluate(const table::Access& access, Accesses* found) {
        uint32_t base = kNoBase;
        Bounds ends;
        switch (evaluation_.bounds(access.address, &base, &ends)) {
            case Evaluation::State::fine:
                return ends.known() && note(access, base, ends, found);
            case Evaluation::State::impossible:
                return true;
            default:
                return false;
        }
    }

    bool note(const table::Access& access, uint32_t base, const Bounds& ends, Accesses* found) {
        const Number length = ends.high - ends.low + access.size;
        if (length < 0 || length >> 64) return false;
        const Range range{static_cast<uint64_t>(ends.low), static_cast<uint64_t>(length), base,
                          access.use};
        if (base == kNoBase && range.begin + range.length < range.begin) return false;
        Range* closest = nullptr;
        uint64_t between = ~0ull;
        for (Range* one = found->ranges; one != found->ranges + found->range_count; ++one) {
            const uint64_t gap = gap_of(*one, range);
            if (gap >= between) continue;
            closest = one;
            between = gap;
        }
        if (between && found->range_count < Accesses::kMostRanges) {
            found->ranges[found->range_count++] = range;
            return true;
        }
        if (!closest) return false;
        if (between) found->widened |= access.use;
        join(closest, range);
        return true;
    }

    // Returns how many bytes are between two ranges of the same kind; the greatest number for
    // others.
    static uint64_t gap_of(const Range& one, const Range& other) {
        if (one.base != other.base || one.use != other.use) return ~0ull;
        const bool is_behind = static_cast<int64_t>(other.begin - one.begin) < 0;
        const uint64_t distance = is_behind ? one.begin - other.begin : other.begin - one.begin;
        const uint64_t length = is_behind ? other.length : one.length;
        return distance > length ? distance - length : 0;
    }

    // Has a range contain another, and what is between them.
    static void join(Range* range, const Range& other) {
        if (static_cast<int64_t>(other.begin - range->begin) < 0) {
            range->length = std::max(other.length, range->begin - other.begin + range->length);
            range->begin = other.begin;
        } else {
            range->length = std::max(range->length, other.begin - range->begin + other.length);
        }
    }

    Evaluation& evaluation_;
    const summaries::View& view_;
    const Launch& launch_;
    Budget* const budget_;
    summaries::InputSet* const deciding_;
    uint32_t cases_ = 0;
    uint32_t of_choices_ = 0;
    uint32_t keys_ = 0;
    uint32_t loops_ = 0;
    uint64_t places_[kMostChoices];
};

// Results of launches, by all that they depend on: the inputs are hashed, to 128 bits. Of the
// inputs count those that the evaluation has read: others are often what was left on a stack, in
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
size_t replaced = 0;  // guarded by the mutex

uint64_t folded(uint64_t one, uint64_t other) {
    const auto product = static_cast<unsigned __int128>(one) * other;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// All inputs that may be read.
summaries::InputSet all_of(const summaries::Summary& summary) {
    summaries::InputSet all{};
    for (uint32_t i = 0; i < summary.view.body->compared; ++i) all.add(i);
    return all;
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

    // Needs the mutex.
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

bool recall(const summaries::Summary& summary, const Launch& launch, Accesses* found) {
    const summaries::Deciding& deciding = summary.deciding;
    const uint32_t count = deciding.count.load(std::memory_order_acquire);
    for (const summaries::InputSet* one = deciding.sets; one != deciding.sets + count; ++one)
        if (Memory(summary, launch, *one).recall(found)) return true;
    return Memory(summary, launch, all_of(summary)).recall(found);
}

// Remembers what only these inputs have decided. Needs the mutex.
void remember(const summaries::Summary& summary, const Launch& launch, const Accesses& found,
              const summaries::InputSet& inputs) {
    summaries::Deciding& deciding = summary.deciding;
    const uint32_t count = deciding.count.load(std::memory_order_relaxed);
    uint32_t at = 0;
    while (at < count && std::memcmp(&deciding.sets[at], &inputs, sizeof inputs) != 0) ++at;
    if (at == summaries::Deciding::kMost)
        return Memory(summary, launch, all_of(summary)).remember(found);
    if (at == count) {
        deciding.sets[at] = inputs;
        deciding.count.store(count + 1, std::memory_order_release);
    }
    Memory(summary, launch, inputs).remember(found);
}

// Returns whether the steps have sufficed.
bool compute(Evaluation& evaluation, uint32_t steps, const summaries::Summary& summary,
             const Launch& launch, Accesses* found, summaries::InputSet* deciding) {
    const summaries::View& view = summary.view;
    Budget budget{steps};
    Search search(&evaluation, summary, launch, &budget, deciding);
    *deciding = {};
    found->unknown = 0;
    found->anywhere = 0;
    found->widened = 0;
    found->range_count = 0;
    found->origin_count = 0;
    if (!(summary.row->flags & table::kAccesses)) {
        for (const table::Role* one = view.roles; one != view.roles + view.body->roles; ++one)
            if (one->input == kNone)
                found->anywhere |= one->use;
            else
                add_origin(one->input, one->use | Accesses::kAlone, found);
        if (!(summary.row->flags & table::kReadsKnown))
            found->unknown |= table::kRead | table::kReadFirst;
        if (!(summary.row->flags & table::kWritesKnown)) found->unknown |= table::kWritten;
        return true;
    }
    const table::Access* one = view.accesses;
    while (one != view.accesses + view.body->accesses) one = search.run(one, found);
    return budget.left;
}

// Launches that had not enough steps, in the order in which they came. One that comes while there
// is no room stays as it is until it is forgotten.
struct Hurried {
    const summaries::Summary* summary;
    uint32_t sizes[6];
    uint64_t inputs[table::kMaxInputs];
};
constexpr size_t kMostHurried = 128;
Hurried hurried[kMostHurried];  // guarded by the mutex, as the next two
size_t hurried_first = 0;
size_t hurried_count = 0;

void refine_later(const summaries::Summary& summary, const Launch& launch) {
    if (hurried_count == kMostHurried) return;
    Hurried& one = hurried[(hurried_first + hurried_count++) % kMostHurried];
    one.summary = &summary;
    std::copy(std::begin(launch.sizes), std::end(launch.sizes), one.sizes);
    std::copy_n(launch.inputs, summary.view.body->inputs, one.inputs);
}

// Judges launches of which allocations count where ranges are not known.
class Judge {
  public:
    Judge(const Accesses& found, const uint64_t* inputs) : found_(found), inputs_(inputs) {}

    kernels::Verdict verdict(bool (*extent_of)(uint64_t, Extent*)) {
        if (!(uses() & table::kReadFirst) || !(uses() & table::kWritten))
            return kernels::kIdempotent;
        if ((found_.unknown | found_.anywhere) & kCounted) return kernels::kUndecided;
        for (uint32_t i = 0; i < found_.range_count; ++i) {
            const Range& range = found_.ranges[i];
            if (!is_whole(range, inputs_)) return kernels::kUndecided;
            const uint64_t begin = begin_of(range, inputs_);
            add({begin, begin + range.length}, range.use);
        }
        if (any_meet()) return found_.widened ? kernels::kUndecided : kernels::kOverwrites;
        if (!add_origins(extent_of) || any_meet()) return kernels::kUndecided;
        return kernels::kIdempotent;
    }

  private:
    static constexpr uint32_t kCounted = table::kReadFirst | table::kWritten;
    struct Place {
        Extent extent;
        uint32_t use;
    };

    uint32_t uses() const {
        uint32_t all = found_.unknown | found_.anywhere;
        for (uint32_t i = 0; i < found_.origin_count; ++i) all |= found_.origins[i].use;
        for (uint32_t i = 0; i < found_.range_count; ++i) all |= found_.ranges[i].use;
        return all;
    }

    void add(const Extent& extent, uint32_t use) {
        if (use & kCounted) places_[count_++] = {extent, use};
    }

    // False if it is not known where all origins point to. One that is no pointer is none of those
    // that an access comes from, if there is another.
    bool add_origins(bool (*extent_of)(uint64_t, Extent*)) {
        bool any_null = false;
        for (uint32_t i = 0; i < found_.origin_count; ++i) {
            const auto& [input, use] = found_.origins[i];
            if (!(use & kCounted)) continue;
            const uint64_t address = inputs_[input];
            Extent extent{};
            if (extent_of(address, &extent))
                add(extent, use);
            else if (address >= kLeastAddress || use & Accesses::kAlone ||
                     std::exchange(any_null, true))
                return false;
        }
        return true;
    }

    bool any_meet() const {
        for (const Place* one = places_; one != places_ + count_; ++one)
            for (const Place* other = places_; other != places_ + count_; ++other)
                if (one->use & table::kReadFirst && other->use & table::kWritten &&
                    one->extent.begin < other->extent.end && other->extent.begin < one->extent.end)
                    return true;
        return false;
    }

    const Accesses& found_;
    const uint64_t* const inputs_;
    uint32_t count_ = 0;
    Place places_[Accesses::kMostRanges + Accesses::kMostOrigins];
};

}  // namespace

bool read_inputs(const kernels::Kernel& kernel, const summaries::Summary& summary,
                 const Arguments& arguments, uint64_t* inputs) {
    const summaries::View& view = summary.view;
    std::fill_n(inputs, view.body->inputs, 0);
    if (arguments.buffer) {
        for (uint32_t i = 0; i < view.body->inputs; ++i) {
            const auto [offset, size] = view.inputs[i];
            if (offset > arguments.size || size > arguments.size - offset) return false;
            std::memcpy(&inputs[i], arguments.buffer + offset, size);
        }
        return true;
    }
    if (!arguments.parameters) return !view.body->inputs;
    if (!kernel.laid_out) return false;
    for (const summaries::Piece& piece : summary.pieces) {
        const auto* const from =
            static_cast<const unsigned char*>(arguments.parameters[piece.parameter]);
        if (!from) return false;
        std::memcpy(reinterpret_cast<unsigned char*>(&inputs[piece.input]) + piece.begin,
                    from + piece.offset, piece.size);
    }
    return true;
}

kernels::Verdict judge(const summaries::Summary& summary, const Accesses& found,
                       const uint64_t* inputs,
                       bool (*extent_of)(uint64_t address, Extent* extent)) {
    if (summary.row->flags & table::kPrints) return kernels::kOverwrites;
    if (summary.row->flags & table::kOverwritesNothing) return kernels::kIdempotent;
    return Judge(found, inputs).verdict(extent_of);
}

void compute(const summaries::Summary& summary, const Launch& launch, Accesses* found) {
    const std::lock_guard lock(mutex);
    summaries::InputSet deciding;
    compute(evaluation_of_launches(), kStepsLater, summary, launch, found, &deciding);
}

void find(const summaries::Summary& summary, const Launch& launch, Accesses* found) {
    if (recall(summary, launch, found)) return;
    const std::lock_guard lock(mutex);
    summaries::InputSet deciding;
    if (compute(evaluation_of_launches(), kStepsBefore, summary, launch, found, &deciding))
        return remember(summary, launch, *found, deciding);
    refine_later(summary, launch);
    Memory(summary, launch, all_of(summary)).remember(*found);
}

bool refine() {
    static Hurried next;  // of the hook's thread, whose stack is small
    {
        const std::lock_guard lock(mutex);
        if (!hurried_count) return false;
        next = hurried[hurried_first++ % kMostHurried];
        --hurried_count;
    }
    Launch launch{{}, next.inputs};
    std::copy(std::begin(next.sizes), std::end(next.sizes), launch.sizes);
    Accesses found;
    summaries::InputSet deciding;
    compute(evaluation_of_thread(), kStepsLater, *next.summary, launch, &found, &deciding);
    const std::lock_guard lock(mutex);
    remember(*next.summary, launch, found, deciding);
    return hurried_count;
}

}  // namespace phos::ranges
