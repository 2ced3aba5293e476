#include "ranges/launch_ranges.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>

#include "ranges/remembered.h"
#include "ranges/search.h"

namespace phos::ranges {
namespace {

using table::kNone;

// Most steps for one launch, some nanoseconds each, while it waits, and later. What is not computed
// by then is known by its origin alone.
constexpr uint32_t kStepsBefore = 2'000;
constexpr uint32_t kStepsLater = 32'000;

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
    remember(summary, launch, *found);
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
