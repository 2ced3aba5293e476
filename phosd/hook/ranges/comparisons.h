// Turn comparisons around.
#pragma once

#include "protocol/summaries.h"

namespace phos::ranges {

inline table::How opposite(table::How how) {
    switch (how) {
        case table::kLess:
            return table::kNotLess;
        case table::kNotLess:
            return table::kLess;
        case table::kNotMore:
            return table::kMore;
        case table::kMore:
            return table::kNotMore;
        case table::kEqual:
            return table::kUnequal;
        case table::kUnequal:
            return table::kEqual;
        default:
            return how == table::kNever ? table::kAlways : table::kNever;
    }
}

inline table::How swapped(table::How how) {
    switch (how) {
        case table::kLess:
            return table::kMore;
        case table::kMore:
            return table::kLess;
        case table::kNotMore:
            return table::kNotLess;
        case table::kNotLess:
            return table::kNotMore;
        default:
            return how;
    }
}

inline bool is_strict(table::How how) {
    return how == table::kLess || how == table::kMore;
}

}  // namespace phos::ranges
