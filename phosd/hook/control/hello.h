// Describe the process to a client: the reply to `hello`.
#pragma once

#include <vector>

#include "protocol/wire.h"

namespace phos {

struct HelloReply {
    wire::Hello hello;
    std::vector<wire::DeviceId> devices;  // in the order in which the process numbers them
};
HelloReply make_hello(bool never_stopped);
void note_first_devices();  // after cuInit

}  // namespace phos
