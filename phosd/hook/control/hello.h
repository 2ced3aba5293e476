// What the hook says of its process to a client that asks who it is.
#pragma once

#include <vector>

#include "protocol/wire.h"

namespace phos {

struct HelloReply {
    wire::Hello hello;
    std::vector<wire::DeviceId> devices;  // in the order of the process's own numbers
};
HelloReply make_hello();

}  // namespace phos
