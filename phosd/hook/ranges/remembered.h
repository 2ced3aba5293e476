// Remember what launches access, by all that it depends on.
#pragma once

#include "ranges/accesses.h"
#include "ranges/evaluation.h"

namespace phos::ranges {

// Sets what is remembered of a launch. False if nothing is. Takes no lock.
bool recall(const summaries::Summary& summary, const Launch& launch, Accesses* found);

// Remembers what only these inputs have decided. One thread at a time.
void remember(const summaries::Summary& summary, const Launch& launch, const Accesses& found,
              const summaries::InputSet& inputs);
// The same, of what any input may have decided.
void remember(const summaries::Summary& summary, const Launch& launch, const Accesses& found);

}  // namespace phos::ranges
