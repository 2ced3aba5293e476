// Asks for the definition after its own, as libraries that wrap others do.
#define _GNU_SOURCE
#include <dlfcn.h>

const char* cudnnCreate(void) {
    return "first";
}
const char* cuOther(void) {
    return "first";
}
const char* cuMemAlloc_v2(void) {
    return "not the driver's";
}
const char* (*next_definition(const char* name))(void) {
    const char* (*found)(void) = (const char* (*)(void))dlsym(RTLD_NEXT, name);
    return found;
}
