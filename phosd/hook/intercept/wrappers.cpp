// Define the wrappers of all functions in hooks.def, their table, and the exported driver names, to
// which programs linked to libcuda bind.
#include "intercept/wrappers.h"

#include <string_view>

#include "base/driver.h"
#include "base/overrides.h"
#include "base/process.h"
#include "gate/gate.h"
#include "write_sets/graphs.h"
#include "write_sets/launches.h"
#include "write_sets/writes.h"

namespace phos {
namespace {

template <auto Member>
auto real_function() {
    auto real = __atomic_load_n(&(driver.*Member), __ATOMIC_ACQUIRE);
    if (__builtin_expect(!real, 0) && load_driver())
        real = __atomic_load_n(&(driver.*Member), __ATOMIC_ACQUIRE);
    return real;
}

template <auto Member, class Hold, class Function>
struct Held;
template <auto Member, class Hold, class... Arguments>
struct Held<Member, Hold, CUresult (*)(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        const auto real = real_function<Member>();
        if (__builtin_expect(!real, 0)) return CUDA_ERROR_NOT_INITIALIZED;
        const Hold hold;
        return real(arguments...);
    }
};

template <auto Member, class Rule, bool PerThread, class Function>
struct Writing;
template <auto Member, class Rule, bool PerThread, class... Arguments>
struct Writing<Member, Rule, PerThread, CUresult (*)(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        const auto real = real_function<Member>();
        if (__builtin_expect(!real, 0)) return CUDA_ERROR_NOT_INITIALIZED;
        const gate::Pass pass;
        if (__builtin_expect(cow::armed.load(std::memory_order_acquire) ||
                                 kernels::counting.load(std::memory_order_relaxed),
                             0))
            write_sets::before<Rule>(PerThread, arguments...);
        return real(arguments...);
    }
};

// Returns whether stream 0 of this variant is the thread's own.
constexpr bool is_per_thread(std::string_view name) {
    if (name.size() < 5) return false;
    const std::string_view suffix = name.substr(name.size() - 5);
    return suffix == "_ptsz" || suffix == "_ptds";
}

template <auto Member, auto Wrapper, bool Always, class Function>
struct Owned;
template <auto Member, auto Wrapper, bool Always, class... Arguments>
struct Owned<Member, Wrapper, Always, CUresult (*)(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        const auto real = real_function<Member>();
        if (__builtin_expect(!real, 0)) return CUDA_ERROR_NOT_INITIALIZED;
        const KeepErrno keep;
        if constexpr (Always) return Wrapper(arguments...);
        if (!active()) return real(arguments...);
        const gate::Ask ask;
        return Wrapper(arguments...);
    }
};

}  // namespace

// One jump slot for each exported name.
extern "C" {
#define PHOS_SLOT(name, ...)                                                   \
    extern __attribute__((visibility("hidden"))) void* const phos_slot_##name; \
    void* const phos_slot_##name = reinterpret_cast<void*>(&__VA_ARGS__::call);
#define PHOS_OWNED(name, always) \
    PHOS_SLOT(name, Owned<&Driver::name, &overrides::name, always, decltype(&::name)>)
#define PHOS_WRITES(name, rule) \
    PHOS_SLOT(name,             \
              Writing<&Driver::name, write_sets::rule, is_per_thread(#name), decltype(&::name)>)
#define PHOS_GATED(name, why) PHOS_SLOT(name, Held<&Driver::name, gate::Pass, decltype(&::name)>)
#define PHOS_ASKS(name, what) PHOS_SLOT(name, Held<&Driver::name, gate::Ask, decltype(&::name)>)
#define PHOS_OWN(name) PHOS_OWNED(name, false)
#define PHOS_ENTRY(name) PHOS_OWNED(name, true)
#include "hooks.def"
}

#if !defined(__x86_64__)
#error "the exported names are jumps written for x86-64"
#endif
#define PHOS_EXPORT(name)                                                                        \
    asm(".text\n.p2align 4\n.globl " #name "\n.type " #name ",@function\n" #name                 \
        ":\n.cfi_startproc\nendbr64\njmp *phos_slot_" #name "(%rip)\n.cfi_endproc\n.size " #name \
        ",.-" #name "\n");
#define PHOS_WRITES(name, rule) PHOS_EXPORT(name)
#define PHOS_GATED(name, why) PHOS_EXPORT(name)
#define PHOS_ASKS(name, what) PHOS_EXPORT(name)
#define PHOS_OWN(name) PHOS_EXPORT(name)
#define PHOS_ENTRY(name) PHOS_EXPORT(name)
#include "hooks.def"

HookTable hooks() {
#define PHOS_ROW(name, ...) \
    {#name, phos_slot_##name, reinterpret_cast<void**>(&driver.name), __VA_ARGS__},
    static const Hook table[] = {
#define PHOS_WRITES(name, rule) PHOS_ROW(name)
#define PHOS_GATED(name, why) PHOS_ROW(name)
#define PHOS_ASKS(name, what) PHOS_ROW(name, true)
#define PHOS_OWN(name) PHOS_ROW(name)
#define PHOS_ENTRY(name) PHOS_ROW(name)
#include "hooks.def"
    };
    return {table, table + sizeof table / sizeof *table};
}

HookTable known_names() {
    static struct {
#define PHOS_LEFT(name, why) void* name;
#include "hooks.def"
    } left;
    static const Hook table[] = {
#define PHOS_USED(name) {#name, nullptr, reinterpret_cast<void**>(&driver.name)},
#define PHOS_LEFT(name, why) {#name, nullptr, &left.name},
#include "hooks.def"
    };
    return {table, table + sizeof table / sizeof *table};
}

}  // namespace phos
