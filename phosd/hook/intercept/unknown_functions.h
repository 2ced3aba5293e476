// Driver functions that this hook does not know: they run as they are, and are noticed when called.
#pragma once

namespace phos {

// What a program gets for `real`, found under `name`: a stand-in that marks the process as not
// parkable at its first call, waits while the gate is closed, and goes on to `real` with all
// arguments untouched. A program that only looks the function up (the CUDA runtime looks up
// everything) loses nothing. Null when there is no stand-in left.
void* stand_in(const char* name, void* real);

}  // namespace phos
