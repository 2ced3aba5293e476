// The hook's thread: it listens, and does what a client asks. docs/reference/hook-protocol.md.
#pragma once

namespace phos::control {

void start();

}  // namespace phos::control
