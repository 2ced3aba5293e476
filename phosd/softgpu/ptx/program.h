// A kernel in the form that runs: operations on the register file of a warp, in basic blocks.
//
// The register file holds every register as one slot: 32 lanes beside each other, of 32 bits (also
// for 8- and 16-bit registers) or of 64. A predicate is one 32-bit mask. Constants and the special
// registers that do not change are slots too, so an operand is always an offset in the file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "machine.h"
#include "types.h"

namespace phos::ptx {

constexpr unsigned kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

// Generic addresses of memory that is not global carry a window above every host address.
constexpr uint64_t kSharedWindow = 0x0100'0000'0000'0000;
constexpr uint64_t kLocalWindow = 0x0200'0000'0000'0000;
constexpr uint64_t kParamWindow = 0x0300'0000'0000'0000;
constexpr uint64_t kFunctionWindow = 0x0400'0000'0000'0000;
constexpr uint64_t kWindowMask = 0xff00'0000'0000'0000;

struct Warp;
struct Op;
using Handler = void (*)(const Op&, Warp&, uint32_t mask);

// Where a memory operation reads or writes, and which slots it moves.
struct Access {
    Space space = Space::generic;
    bool based = false;      // the address is a slot plus `offset`, else `offset` alone
    bool wide_base = false;  // a slot of 64-bit lanes
    uint32_t base = 0;
    int64_t offset = 0;
    unsigned element = 0;  // bytes of one component
    unsigned count = 1;    // components, at most 8
    std::array<uint32_t, 8> slots{};
};

struct Op {
    Handler run = nullptr;
    uint32_t d = 0, a = 0, b = 0, c = 0;
    uint32_t guard = 0, flip = 0;  // lanes take part where (predicate ^ flip) is set
    union {
        uint64_t value = 0;
        const Access* access;
    };
};

struct Copy {
    uint32_t from, to, bytes;  // offsets in the caller's and the callee's local frames
};

// What a call passes, by position: where the caller keeps it.
struct CallSite {
    std::vector<std::pair<uint32_t, uint32_t>> arguments, results;  // offset, bytes
    uint32_t frame_bytes = 0;                                       // of the caller
    uint32_t return_block = 0;
};

enum class Builtin : uint8_t { none, vprintf, assertfail };

struct FunctionCode {
    std::string name;
    uint32_t entry_block = 0;
    std::vector<std::pair<uint32_t, uint32_t>> parameters, results;  // offset, bytes in the frame
    uint32_t frame_bytes = 0;
    Builtin builtin = Builtin::none;
    // Registers to keep across a call of a function that may call itself.
    bool recursive = false;
    std::vector<uint32_t> saved32, saved64, saved_predicates;
};

enum class End : uint8_t {
    next,
    branch,
    indexed,
    call,
    call_indirect,
    ret,
    exit,
    trap,
    breakpoint,
    barrier_sync,
    barrier_arrive,
    barrier_and,
    barrier_or,
    barrier_popc,
};

struct Block {
    uint32_t first = 0, last = 0;  // its operations
    End end = End::next;
    bool converge = false;  // waits for the lanes that `members` names
    uint32_t members = 0;   // slot of the membership mask
    uint32_t guard = 0, flip = 0;
    uint32_t target = 0;  // block of a branch; index of a call's callee
    uint32_t index = 0;   // slot: branch index, function address, or barrier number
    uint32_t count = 0;   // slot of a barrier's thread count
    bool counted = false;
    uint32_t d = 0, source = 0, source_flip = 0;  // predicates (or slot) of a barrier reduction
    uint32_t extra = 0;  // index of the call site or of the list of targets
    unsigned line = 0;
};

// Registers that keep their value while a block runs.
enum class Special : uint8_t {
    tid_x,
    tid_y,
    tid_z,
    ntid_x,
    ntid_y,
    ntid_z,
    ctaid_x,
    ctaid_y,
    ctaid_z,
    nctaid_x,
    nctaid_y,
    nctaid_z,
    clusterid_x,
    clusterid_y,
    clusterid_z,
    nclusterid_x,
    nclusterid_y,
    nclusterid_z,
    cluster_ctaid_x,
    cluster_ctaid_y,
    cluster_ctaid_z,
    cluster_nctaid_x,
    cluster_nctaid_y,
    cluster_nctaid_z,
    cluster_ctarank,
    cluster_nctarank,
    laneid,
    warpid,
    nwarpid,
    smid,
    nsmid,
    gridid,
    lanemask_eq,
    lanemask_le,
    lanemask_lt,
    lanemask_ge,
    lanemask_gt,
    dynamic_smem_size,
    total_smem_size,
    frame,  // not PTX's: where the lane's frame in local memory begins
};

struct Constant {
    uint32_t slot;
    bool wide;
    uint64_t bits;
};

struct Program {
    std::vector<Op> ops;
    std::vector<unsigned> lines;  // of each operation
    std::vector<Block> blocks;
    std::vector<FunctionCode> functions;
    std::vector<int32_t> function_of_address;  // module's function index to `functions`, or -1
    std::vector<CallSite> call_sites;
    std::vector<std::vector<uint32_t>> targets;
    std::deque<Access> accesses;
    std::vector<Constant> constants;
    std::vector<std::pair<Special, uint32_t>> specials;
    uint32_t predicate_always = 0;
    uint32_t frame_slot = 0;
    uint32_t register_bytes = 0;
    uint32_t entry_block = 0;
    size_t local_bytes = 0;  // of one lane
    size_t static_shared_bytes = 0;
    size_t shared_alignment = 16;
};

struct KernelCode : Kernel {
    Program program;
};

}  // namespace phos::ptx
