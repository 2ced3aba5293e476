// Turn what an address is made of into sums of unknowns, for one launch:
// phosd/engine/analysis/reference/evaluation.py and iterations.py in C++, which say how.
#pragma once

#include <cstdint>

#include "code/summaries.h"
#include "ranges/sums.h"

// A node is computed within others: what is in the frame of one kind is not to be in all.
#define PHOS_OWN_FRAME __attribute__((noinline))

namespace phos::ranges {

struct Launch {
    uint32_t sizes[6];       // ntid.x, .y, .z, nctaid.x, .y, .z
    const uint64_t* inputs;  // by their numbers
};

// The values that the nodes of one alternative have for a launch, and what holds of them. One
// object is used for one alternative after the other.
class Evaluation {
  public:
    // `inner` evaluates what is of any thread.
    explicit Evaluation(Evaluation* inner) : inner_(inner) {}

    // Begins with another kernel, or launch, or access. What it reads of the inputs is added to
    // `deciding`.
    void begin(const summaries::View& view, const Launch& launch, Budget* budget,
               summaries::InputSet* deciding);
    // Begins with another alternative.
    void next();

    // The alternative that a key's choices take.
    void choose(uint32_t key, uint32_t place) { set(chosen_, key, place); }
    // The alternative that they take because of what holds at the access.
    void decide(uint32_t key, uint32_t place) { set(decided_, key, place); }
    // Whether the loop is in its first iteration, or in a later one.
    void enter(uint32_t loop, bool first) { set(entered_, loop, first); }

    // Notes that a condition holds, or that it does not.
    void constrain(const table::Condition& condition, bool holds);
    // Returns which alternatives choices with a key may take, as bits; 0: too many.
    uint64_t places(uint32_t key);

    enum class State {
        fine,
        impossible,  // this alternative cannot be
        lost,        // its address is too much, or not known
    };
    // Sets the bounds of an address, without multiples of 2^64, and what it begins at: an input or
    // kNoBase. Several may be asked for.
    State bounds(uint32_t address, uint32_t* base, Bounds* found);
    State state() const { return state_; }

  private:
    static constexpr uint32_t kMostSums = 512;
    static constexpr uint32_t kDeepest = 48;

    // Numbers by index, of which those of an earlier alternative do not count.
    struct Marks {
        uint32_t stamps[table::kMaxNodes];
        uint16_t values[table::kMaxNodes];
    };
    void set(Marks& marks, uint32_t at, uint32_t value) {
        marks.stamps[at] = &marks == &decided_ ? access_ : stamp_;
        marks.values[at] = static_cast<uint16_t>(value);
    }
    bool has(const Marks& marks, uint32_t at) const { return marks.stamps[at] == stamp_; }

    bool lose();
    bool forget();
    bool contradict();
    bool hold(const Sum& sum);
    bool bounds_of(const Sum& sum, Bounds* found);
    bool unknown(const Bounds& within, Sum* made);
    Sum* fresh();

    // These return null, or false, if the state is not fine any more.
    const Sum* node(uint32_t at);
    bool make(const table::Node& node, Sum* made);
    bool sum(const table::Node& node, Sum* made);
    PHOS_OWN_FRAME bool product(const table::Node& node, Sum* made);
    bool word(const table::Node& node, Sum* made);
    PHOS_OWN_FRAME bool quotient(const table::Node& node, Sum* made);
    PHOS_OWN_FRAME bool common(const table::Node& node, Sum* made);
    bool choice(const table::Node& node, Sum* made);
    bool hull(const table::Node& node, uint64_t places, Sum* made);
    PHOS_OWN_FRAME bool elsewhere(const table::Node& node, Sum* made);
    PHOS_OWN_FRAME bool extreme(const table::Node& node, Sum* made);
    PHOS_OWN_FRAME bool carried(const table::Node& node, Sum* made);
    PHOS_OWN_FRAME bool towards(const Sum& initial, const Sum* each, Sum* made);
    const Sum* iterations(uint32_t loop);
    PHOS_OWN_FRAME bool limit(const table::Condition& condition, uint8_t count, bool later,
                              Bounds* most);
    PHOS_OWN_FRAME bool until_equal(const Sum& start, const Sum& end, int64_t step, unsigned width,
                                    uint8_t count, Bounds* most);
    // As System.as_word: false in `found` if it is not the same sum for all threads.
    bool as_word(const Sum& sum, Number least, unsigned bits, bool* found, Sum* made, Bounds* ends);
    PHOS_OWN_FRAME bool note(const table::Condition& condition, table::How how);
    PHOS_OWN_FRAME bool note_between(const table::Condition& condition, bool swapped,
                                     const Sum& larger, bool strict);
    // 1, 0, or -1 if neither is known.
    int holds(const table::Condition& condition);

    Evaluation* const inner_;
    summaries::View view_{};
    Launch launch_{};
    Budget* budget_ = nullptr;
    summaries::InputSet* deciding_ = nullptr;
    State state_ = State::fine;
    uint32_t stamp_ = 0;
    uint32_t access_ = 0;
    uint32_t depth_ = 0;
    uint32_t used_ = 0;
    System system_{};
    Marks nodes_{};
    Marks chosen_{};
    Marks decided_{};
    Marks entered_{};
    Marks counts_{};  // of iterations
    Sum sums_[kMostSums];
};

}  // namespace phos::ranges
