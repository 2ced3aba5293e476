// The table of what a module's kernels access (docs/design/analysis.md), as phosd encodes it
// (phosd/engine/analysis/table.py; a test compares the two). All is little-endian. The hook
// checks all of a table, once, before any of it is used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phos::table {

constexpr uint64_t kMagic = 0x4D55'535F'534F'4850;  // "PHOS_SUM"
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxKernels = 1u << 16;
constexpr uint64_t kMaxBytes = 64ull << 20;
constexpr uint32_t kMaxName = 4096;
constexpr uint32_t kMaxInputs = 256;
constexpr uint32_t kMaxNodes = 4096;
constexpr uint32_t kMaxAccesses = 256;
constexpr uint32_t kMaxRefs = 1u << 16;
constexpr uint32_t kNone = 0xFFFF'FFFF;

struct Header {
    uint64_t magic;
    uint32_t version;
    uint32_t architecture;  // such as 90
    uint64_t module;        // hash of the image, as modules.h computes it
    uint64_t size;          // of the table, bytes
    uint32_t kernel_count;
    uint32_t reserved;
};
static_assert(sizeof(Header) == 40);

// What of a kernel is known for every launch.
enum KernelFlags : uint32_t {
    kReadsKnown = 1,          // all addresses that it reads come from its roles
    kWritesKnown = 2,         // the same of those that it writes
    kRangesRead = 4,          // its launches tell the ranges that it reads
    kRangesWritten = 8,       // and those that it writes
    kAccesses = 16,           // its accesses are listed; otherwise its roles are all that there is
    kPrints = 32,             // what is printed would be printed again
    kOverwritesNothing = 64,  // of what it reads: any of its launches may be run again
};

// By (name_hash, name).
struct Kernel {
    uint64_t name_hash;  // 64-bit FNV-1a
    uint32_t name_at;    // from the begin of the table
    uint32_t name_size;
    uint32_t flags;
    uint32_t parameter_bytes;
    uint32_t body_at;
    uint32_t body_size;
};
static_assert(sizeof(Kernel) == 32);

// How many there are of each part of a body. The parts follow in this order.
struct Body {
    uint32_t roles;
    uint32_t inputs;
    uint32_t nodes;
    uint32_t factors;
    uint32_t conditions;
    uint32_t keys;
    uint32_t loops;
    uint32_t accesses;
    uint32_t refs;
    uint32_t compared;  // the first inputs: what ranges depend on, but for where they begin
    uint32_t reserved[2];
};
static_assert(sizeof(Body) == 48);

// Bits. kReadFirst: what is read may have been there before the launch.
enum Use : uint32_t { kRead = 1, kWritten = 2, kReadFirst = 4, kUses = 7 };

// What is done through a pointer among the parameters.
struct Role {
    uint32_t input;  // kNone: whichever word of them
    uint32_t use;    // Use
};

// A number among the parameters.
struct Input {
    uint32_t offset;
    uint32_t size;  // 1, 2, 4 or 8
};

enum NodeKind : uint8_t {
    kSum,        // the constant `low`, `high` and `count` factors from `at` on
    kParameter,  // the input `one`
    kPointer,    // the input `one`, which only moves ranges
    kDimension,  // ntid.x, .y, .z, nctaid.x, .y, .z
    kThread,     // tid.x, .y, .z, ctaid.x, .y, .z, laneid
    kProduct,    // of `count` refs from `at` on
    kWord,       // the node `one` modulo 2^bits, from `low` on: 0, or -2^(bits-1)
    kQuotient,   // the node `one` divided by `low`, rounded down
    kCommon,     // the bits that the nodes `one` and `other` have in common; at most `low`
    kChoice,     // by key `one`, of `count` refs from `at` on
    kElsewhere,  // the node `one`, of any thread
    kLeast,      // of `count` refs from `at` on
    kGreatest,
    kCarried,   // the node `one`, and the node `other` (or kNone: anything) for each iteration of
                // the loop `at`, modulo 2^bits
    kAnything,  // with bits, from `low` to `high`
};

// Nodes come after those that they refer to, but for what the conditions of loops refer to.
struct Node {
    uint8_t kind;  // NodeKind
    uint8_t bits;
    uint16_t count;
    uint32_t one;
    uint32_t at;
    uint32_t other;
    int64_t low;
    int64_t high;
};
static_assert(sizeof(Node) == 32);

struct Factor {
    int64_t factor;
    uint32_t node;
    uint32_t reserved;
};
static_assert(sizeof(Factor) == 16);

enum How : uint8_t { kNever, kAlways, kLess, kNotMore, kMore, kNotLess, kEqual, kUnequal };

// A comparison of words of `width` bits: of the nodes, and of the numbers that they are as words.
struct Condition {
    uint8_t how;  // How
    uint8_t is_signed;
    uint16_t width;
    uint32_t one;
    uint32_t other;
    uint32_t word_of_one;
    uint32_t word_of_other;
    uint32_t reserved;
};
static_assert(sizeof(Condition) == 24);

// Which of `count` alternatives choices take: all with the same key the same.
enum KeyKind : uint32_t {
    kUndecided,
    kIf,    // the first where the condition `at` holds, the second elsewhere
    kMeet,  // number n needs refs[at + 2n + 1] conditions: the refs from refs[at + 2n] on
};
struct Key {
    uint32_t kind;
    uint32_t at;
    uint32_t count;
    uint32_t reserved;
};
static_assert(sizeof(Key) == 16);

// Conditions, which hold whenever it goes on.
struct Loop {
    uint32_t at;
    uint32_t count;
};

struct List {
    uint32_t at;  // in the refs
    uint32_t count;
};

enum AccessFlags : uint8_t {
    kUnknownOrigin = 1,  // the address may come from elsewhere than the parameters
    kFromAnyWord = 2,    // it may come from any word of them
};
struct Access {
    uint32_t address;  // a node; kNone: no launch tells its range
    uint32_t size;     // bytes
    uint8_t use;       // Use
    uint8_t flags;     // AccessFlags
    uint16_t reserved;
    List facts;    // conditions that hold there
    List decided;  // pairs of a key and the alternative that it takes there
    List choices;  // keys that the address depends on
    List loops;    // that the address depends on
    List origins;  // inputs that the address may come from
};
static_assert(sizeof(Access) == 52);

}  // namespace phos::table
