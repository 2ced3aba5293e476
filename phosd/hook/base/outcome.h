// The outcome of a request, for the reply.
#pragma once

#include <cstdint>
#include <string>

#include "protocol/wire.h"

namespace phos {

struct Outcome {
    wire::Status status = wire::Status::ok;
    uint64_t count = 0;
    std::string text;  // for the user, if `status` is not ok
};

}  // namespace phos
