/* Computes on the GPU, and has its say in its checkpoints with phos.h alone. It prints a line a
 * step, `<step> <value>`, for as many steps as its argument says, and lines that begin with "#". */
#include <phos.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SAVED_AT = 20 };

#define FUNCTION(name, ...) static int (*name)(__VA_ARGS__)
FUNCTION(init, unsigned);
FUNCTION(retain, void**, int);
FUNCTION(set_current, void*);
FUNCTION(allocate, unsigned long long*, size_t);
FUNCTION(fill, unsigned long long, unsigned, size_t);
FUNCTION(fetch, void*, unsigned long long, size_t);

static void find(void* driver, const char* name, void* at) {
    void* found = dlsym(driver, name);
    if (!found) exit(2);
    *(void**)at = found;
}

static void ok(int result) {
    if (result != 0) {
        fprintf(stderr, "CUDA answered %d\n", result);
        exit(1);
    }
}

int main(int argc, char** argv) {
    const long steps = argc > 1 ? atol(argv[1]) : 0;
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    void* context = NULL;
    unsigned long long memory = 0;
    unsigned value = 1;
    long step;
    if (!driver) return 2;
    find(driver, "cuInit", &init);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuCtxSetCurrent", &set_current);
    find(driver, "cuMemAlloc_v2", &allocate);
    find(driver, "cuMemsetD32_v2", &fill);
    find(driver, "cuMemcpyDtoH_v2", &fetch);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("# before CUDA %d\n", phos_checkpoint(PHOS_RUN));
    ok(init(0));
    ok(retain(&context, 0));
    ok(set_current(context));
    ok(allocate(&memory, 1 << 20));
    ok(fill(memory, value, 1 << 18));
    for (step = 0; steps == 0 || step < steps; ++step) {
        int outcome;
        ok(fetch(&value, memory + 4 * (unsigned long long)(step % 1000), sizeof value));
        value = value * 1664525u + 1013904223u;
        ok(fill(memory, value, 1 << 18));
        printf("%ld %08x\n", step, value);
        usleep(10000);
        if (step == SAVED_AT) {
            outcome = phos_checkpoint_named(PHOS_RUN, "in_c");
            printf("# %ld %d%s\n", step, outcome, phos_why());
        }
        outcome = phos_safe_point();
        if (outcome != PHOS_NOTHING) printf("# %ld %d%s\n", step, outcome, phos_why());
    }
    return 0;
}
