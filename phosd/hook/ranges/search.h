// Find where the accesses of a kernel are in one launch, by their addresses or by their origins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ranges/accesses.h"
#include "ranges/evaluation.h"

namespace phos::ranges {

// Notes that an access comes from an input: then only that allocation is known.
void add_origin(uint32_t input, uint32_t use, Accesses* found);

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
    const table::Access* run(const table::Access* first, Accesses* found);

  private:
    static constexpr uint32_t kMostCases = 32;
    static constexpr uint32_t kMostChoices = 256;

    static bool is_alike(const table::Access& one, const table::Access& other) {
        return std::memcmp(&one.facts, &other.facts,
                           offsetof(table::Access, origins) - offsetof(table::Access, facts)) == 0;
    }

    // Chooses the alternatives; one that has all of them if there are too many.
    bool split(const table::Access& access);
    // Notes what holds in a case. False if it cannot be.
    bool assume(const table::Access& access, uint32_t one);
    // Adds where an access is in this case; false if it is not known.
    bool evaluate(const table::Access& access, Accesses* found);

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

}  // namespace phos::ranges
