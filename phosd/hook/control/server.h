// Run the hook's thread, which listens for clients and serves their requests
// (docs/reference/hook-protocol.md).
#pragma once

namespace phos::control {

void start();

}  // namespace phos::control
