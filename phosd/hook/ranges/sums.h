// Sums of unknowns with factors, and the range that they can have:
// phosd/engine/analysis/reference/linear.py in C++, which says how. What does not fit is not known;
// nothing is allocated.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phos::ranges {

__extension__ typedef __int128 Number;

constexpr size_t kMostTerms = 16;  // of a sum
constexpr size_t kMostUnknowns = 64;
constexpr uint32_t kNoBase = 0xFFFF'FFFF;

struct Bounds {
    bool has_low = false;
    bool has_high = false;
    Number low = 0;
    Number high = 0;

    bool known() const { return has_low && has_high; }
};
inline Bounds between(Number low, Number high) {
    return {true, true, low, high};
}

// How many numbers have so many bits.
inline Number size_of(unsigned bits) {
    return Number{1} << bits;
}

// What is added to `base`, an input that holds a pointer, if it has one.
struct Sum {
    Number constant;
    uint64_t mask;  // of the unknowns
    int64_t factors[kMostTerms];
    uint8_t unknowns[kMostTerms];  // ascending
    uint32_t count;
    uint32_t base;

    bool is_number() const { return !count && base == kNoBase; }
    int64_t factor_of(uint8_t unknown) const;
};

inline void set(Sum* sum, Number value) {
    sum->constant = value;
    sum->mask = 0;
    sum->count = 0;
    sum->base = kNoBase;
}

// These return false if the result does not fit, which then is undefined. `sum` may be `other`.
bool add(Sum* sum, const Sum& other, int64_t factor);
bool multiply(Sum* sum, Number factor);
bool move(Sum* sum, Number by);
// Makes the factors and the number the smallest that are the same modulo 2^bits.
bool reduce(Sum* sum, unsigned bits);
// Divides by a number that divides all factors, rounding down; false if it does not.
bool divide(Sum* sum, int64_t divisor);

inline Number floor_of(Number value, Number divisor) {
    const Number quotient = value / divisor;
    return quotient - (value % divisor != 0 && (value < 0) != (divisor < 0));
}

// Work that is left, in steps of some nanoseconds.
struct Budget {
    uint32_t left;

    bool spend(uint32_t steps) {
        left -= left < steps ? left : steps;
        return left != 0;
    }
};

// Unknowns with their bounds, and sums of them that are not negative.
class System {
  public:
    void reset(Budget* budget);

    // Adds an unknown; false if there are too many.
    bool make(const Bounds& within, uint8_t* unknown);
    void narrow(uint8_t unknown, const Bounds& within) {
        known_[unknown] = within;
        answered_ = 0;
    }

    // Notes that a sum is not negative. False if it always is.
    bool hold(const Sum& sum);

    // Sets the bounds of a sum, without its base. False if there is no such number.
    bool bounds(const Sum& sum, Bounds* found);

  private:
    static constexpr size_t kMostConstraints = 24;
    static constexpr int kDeepest = 3;

    // The bounds of a sum but for its number, with as many constraints: kernels access memory at
    // addresses that differ by numbers.
    struct Answer {
        uint32_t held;
        Sum sum;
        Bounds bounds;
    };
    static constexpr size_t kAnswers = 8;

    void search(const Sum& sum, Bounds* found);
    bool least(const Sum& sum, uint32_t used, int depth, Number* found);

    Budget* budget_;
    uint32_t unknowns_;
    uint32_t held_;  // how many constraints there were; the last ones are kept
    Bounds known_[kMostUnknowns];
    Sum constraints_[kMostConstraints];
    uint32_t answered_;
    Answer answers_[kAnswers];
};

}  // namespace phos::ranges
