// Notice that the program closes the hook's descriptors.
//
// poll() keeps its files open, even when the program has closed them: a listener would go on taking
// connections that cannot be accepted any more. Only the near end of this pipe is polled; it
// reports at once that the far one was closed.
#pragma once

namespace phos::closing_pipe {

// Makes the pipe, unless it is there. Tried again: the program may have no descriptor left.
void make();
void remove();

// Removes the pipe if the program has closed an end of it; returns whether it has.
bool remove_closed();

// The end to poll; -1 if there is none.
int near_end();

}  // namespace phos::closing_pipe
