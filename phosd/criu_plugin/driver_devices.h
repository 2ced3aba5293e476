// Tells the GPU driver's devices from other files.
//
// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
#pragma once

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdlib>

namespace phos::criu {

// Whether it is one of the driver's devices: `kinds` has their kinds and major numbers, such as
// "c195 c238", as /proc/devices tells phosd. Parsed each time: CRIU has no thousands.
inline bool is_one_of(const char* kinds, const struct stat& file) {
    const char kind = S_ISCHR(file.st_mode) ? 'c' : S_ISBLK(file.st_mode) ? 'b' : 0;
    while (kind && kinds && *kinds) {
        char* rest = nullptr;
        const unsigned long number = std::strtoul(kinds + 1, &rest, 10);
        if (rest == kinds + 1) return false;
        if (*kinds == kind && number == major(file.st_rdev)) return true;
        kinds = *rest == ' ' ? rest + 1 : rest;
    }
    return false;
}

}  // namespace phos::criu
