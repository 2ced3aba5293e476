#include <cstdint>
#include <utility>

#include "ranges/launch_ranges.h"

namespace phos::ranges {
namespace {

// No memory is mapped below it (vm.mmap_min_addr): such an input is no pointer.
constexpr uint64_t kLeastAddress = 1u << 16;

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

kernels::Verdict judge(const summaries::Summary& summary, const Accesses& found,
                       const uint64_t* inputs,
                       bool (*extent_of)(uint64_t address, Extent* extent)) {
    if (summary.row->flags & table::kPrints) return kernels::kOverwrites;
    if (summary.row->flags & table::kOverwritesNothing) return kernels::kIdempotent;
    return Judge(found, inputs).verdict(extent_of);
}

}  // namespace phos::ranges
