#include "control/closing_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <initializer_list>

#include "base/descriptors.h"

namespace phos::closing_pipe {
namespace {

int near = -1;
int far = -1;

bool is_closed(int descriptor) {
    return descriptor >= 0 && !descriptors::is_ours(descriptor);
}

}  // namespace

void make() {
    int ends[2];
    if (near >= 0 || pipe2(ends, O_CLOEXEC) != 0) return;
    near = descriptors::keep_socket(ends[0]);
    far = descriptors::keep_socket(ends[1]);
}

void remove() {
    for (int* const end : {&near, &far}) {
        if (*end >= 0) descriptors::release(*end);
        *end = -1;
    }
}

bool remove_closed() {
    const bool any = is_closed(near) || is_closed(far);
    if (any) remove();
    return any;
}

int near_end() {
    return near;
}

}  // namespace phos::closing_pipe
