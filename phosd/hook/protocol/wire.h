// The protocol between the hook in a GPU process and the engine (docs/reference/hook-protocol.md).
// phosd/engine/hook_client/wire.py is the other side; a test compares the two.
//
// Everything is little-endian and fixed-size. A message is a Header, then `length` bytes of
// payload; its descriptors travel as SCM_RIGHTS with the first byte of the header. The client sends
// one request at a time and the hook answers each with the same type (plus kReply) and sequence.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phos::wire {

constexpr uint32_t kMagic = 0x534F4850;  // "PHOS"
constexpr uint16_t kVersion = 1;
constexpr uint16_t kReply = 0x8000;
constexpr uint32_t kMaxPayload = 1u << 16;
constexpr uint32_t kMaxDescriptors = 128;  // below the kernel's SCM_MAX_FD of 253

enum class Type : uint16_t {
    hello = 1,       // -> Hello and its DeviceIds
    list_blocks,     // Cursor -> BlockList, no descriptors
    export_blocks,   // Cursor -> BlockList, one descriptor for each block with kHasDescriptor
    close_gate,      // CloseGate -> GateState; poll until `settled`
    park,            // (empty) -> Count: unmap and release everything; needs a settled gate
    unpark_blocks,   // BlockIds + one descriptor each -> Count: hand memory back, in batches
    unpark,          // (empty) -> Count: map every block again; needs all of them handed back
    open_gate,       // (empty) -> (empty)
    rehome,          // (empty) or BlockIds -> Count: make imported blocks the process's own, all or
                     // those of the ids; settled gate
    detach,          // (empty) -> (empty); then the hook holds no socket until `<pid>.wake` exists
    stats,           // (empty) -> text: counters and the log ring, UTF-8
    arm,             // Arm + descriptors of the board and of each slab -> Count of pending chunks:
                     // copy-on-write begins; settled gate
    disarm,          // (empty) -> Count of shadowed chunks: it ends; the board stays mapped
    forget,          // (empty) -> (empty): the hook releases the board
    kernels,         // Cursor (how many are known) -> KernelList: launched since `arm`
    empty_cache,     // EmptyCache -> ReleaseState: PyTorch releases its cached memory; open gate;
                     // poll while `asked`
    may_see,         // Cursor (a pid) -> Count: 0, or the errno of looking at what it executes
    seal_gate,       // (empty) -> Count: also calls that submit nothing are held now; how many
                     // threads are still in one: poll until 0; settled gate
    program,         // ProgramAsk -> ProgramState: safe points of the program, and the checkpoints
                     // that it asks for
    images,          // Cursor (how many are known) -> ImageList: what modules were loaded from
    summaries,       // (empty) + a descriptor of a table (summaries.h) -> Count of its kernels
    launches,        // LaunchesAsk -> KernelList, of LaunchedKernels: `kernels` with verdicts
    make_blocks,     // BlockIds -> Count + one descriptor each: the process makes memory of its own
                     // in the place of parked blocks, for the client to fill
    blocks_filled,   // BlockIds -> Count: they are handed back, like those of unpark_blocks
    blocks_renewed,  // BlockIds -> Count: the same, but to other clients they are new blocks
    unfinished,      // (empty) -> Count: for how many milliseconds work is awaited that was
                     // submitted before the gate began to close, also once it is open; 0: for none
};

// The status of a reply. A failed reply's payload is a text for the user, UTF-8.
enum class Status : uint32_t {
    ok = 0,
    bad_message = 1,  // not understood; the connection is closed
    wrong_state = 2,  // e.g. park with an open gate
    unsupported = 3,  // the process cannot be parked; the text says why
    busy = 4,         // the deadline passed; the gate is open again
    driver = 5,       // a driver call failed; the text names it
    out_of_memory = 6,
    not_importable = 7,  // the driver has no GPU for the memory in this process: see make_blocks
};

struct Header {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint32_t sequence;
    uint32_t status;
    uint32_t length;       // bytes of payload
    uint32_t descriptors;  // how many travel with this message
};
static_assert(sizeof(Header) == 24);

enum class State : uint32_t {
    running = 0,  // the gate is open
    closing = 1,  // the gate is closed to new work; admitted work still runs
    closed = 2,   // the gate is closed and every device is idle
    parked = 3,   // closed, and the blocks are unmapped and released
};

struct Hello {
    uint32_t pid;
    uint32_t driver_version;    // from cuDriverGetVersion
    uint32_t devices;           // how many the process sees
    uint32_t state;             // State
    uint32_t parkable;          // 0: `reason` says why not
    uint32_t ever_parked;       // Memories
    uint32_t uses_unsupported;  // 1: managed memory or the like: no mode can save it; see `reason`
    uint32_t never_stopped;  // 1: never parked or detached, so the driver has restored no context
    char reason[256];        // a text, and behind its NUL a code of reasons.def, if both fit
};
static_assert(sizeof(Hello) == 288);

enum Memories : uint32_t {
    kImports = 1,  // it has imported blocks: mode `driver` needs `rehome` first
    kMakes = 2,    // the driver imports none on one of its GPUs: blocks are made (make_blocks)
};

// `DeviceId devices[devices]` follows a Hello, in the order in which the process numbers them. The
// initial CUDA_VISIBLE_DEVICES does not tell: a program may set it before cuInit.
struct DeviceId {
    uint8_t uuid[16];  // from cuDeviceGetUuid
};
static_assert(sizeof(DeviceId) == 16);

enum BlockFlags : uint32_t {
    kHasDescriptor = 1,  // the process can still export it: a descriptor comes with export_blocks
    kExported = 2,       // the program exported it: a peer may hold it
    kImported = 4,       // the program imported it from a peer
    kProgramVmm = 8,     // allocated by the program's own cuMemCreate
    kHostLocated = 16,   // VMM memory in host RAM; with a device, words of events, which it reaches
    kAway = 32,          // parked, and not handed back yet
};

// One physical allocation. `id` is a generation number, never reused in the process.
struct Block {
    uint64_t id;
    uint64_t va;    // where it is mapped first; 0 if it is not mapped
    uint64_t size;  // bytes, a multiple of the device's granularity
    int32_t device;
    uint32_t flags;
};
static_assert(sizeof(Block) == 32);

// Asks for blocks with `id > after`, ordered by id, at most kMaxDescriptors of them.
struct Cursor {
    uint64_t after;
};

struct BlockList {
    uint32_t count;
    uint32_t more;     // 1: ask again with the last id
    uint64_t freed;    // how many blocks the process has freed so far
    uint64_t last_id;  // the newest block id of the process
    // Block blocks[count] follows. Descriptors are in the order of the blocks that have one.
};

struct CloseGate {
    uint32_t deadline_ms;  // counted by the hook from the first request; then the gate opens again
    uint32_t slice_us;     // how long this request may wait for rest: the answer comes by then
    uint32_t for_peers;    // not 0: another process of the group is busy; admit so many submissions
};

struct GateState {
    uint32_t settled;    // 1: closed, nothing admitted is running, every device idle, no capture
    uint32_t busy;       // 1: a device of this process still works
    uint32_t waiting;    // threads held at the gate
    uint32_t capturing;  // stream captures in progress
    uint64_t admitted;   // submissions admitted since the gate began to close
    uint64_t last_id;    // as in BlockList, to notice blocks allocated since the export
    uint64_t freed;
};

struct Count {
    uint64_t count;
};

struct Arm {
    uint32_t slabs;  // descriptors besides the board's
    uint32_t reserved;
};

// `more`: ask again, with the number of known kernels as Cursor. Followed by `count` times a Kernel
// and its name, by first launch.
struct KernelList {
    uint32_t count;
    uint32_t more;
};
struct Kernel {
    uint64_t module;    // hash of the module's image, 0 if unknown
    uint64_t launches;  // since `arm`
    uint32_t flags;     // board::KernelFlags
    uint32_t length;    // of the name, bytes, at most kMaxName
};
static_assert(sizeof(Kernel) == 24);
constexpr uint32_t kMaxName = 4096;

struct LaunchesAsk {
    uint64_t after;    // how many kernels are known
    uint32_t seconds;  // launches are counted for so long, armed or not; 0: no change
    uint32_t reserved;
};
static_assert(sizeof(LaunchesAsk) == 16);

// In the place of a Kernel.
struct LaunchedKernel {
    uint64_t module;
    uint64_t launches;    // since `arm`, or since they are counted
    uint64_t idempotent;  // of these: run again, they would leave the same memory
    uint64_t overwrites;  // they may overwrite what they read
    uint32_t flags;       // board::KernelFlags, LaunchFlags
    uint32_t summary;     // table::KernelFlags, 0 without a table
    uint32_t reserved;
    uint32_t length;  // of the name, bytes, at most kMaxName
};
static_assert(sizeof(LaunchedKernel) == 48);
enum LaunchFlags : uint32_t {
    kAnalysed = 0x100,  // a table has the kernel
    kGuessed = 0x200,   // a launch was predicted by its arguments, or by what the user trusts
};

// Where the bytes of a module's image are.
enum class Held : uint32_t {
    not_kept = 0,   // nowhere: the program may have freed them
    in_object = 1,  // at `address`, in an object that the dynamic linker has loaded
    in_copy = 2,    // at `address`, in a copy of the hook's
    in_file = 3,    // in the file
};

// `more`: ask again, with the number of known images as Cursor. Followed by `count` times an Image
// and the path of its file, if it has one, in the order in which they were loaded.
struct ImageList {
    uint32_t count;
    uint32_t more;
};
struct Image {
    uint64_t hash;  // as Kernel::module
    uint64_t address;
    uint64_t size;    // bytes
    uint32_t held;    // Held
    uint32_t length;  // of the path, bytes, at most kMaxName
};
static_assert(sizeof(Image) == 32);

struct EmptyCache {
    uint32_t ask;  // 1: have the program's interpreter do it; 0: only return the state
    uint32_t reserved;
};

enum class Release : uint32_t {
    none = 0,      // it was not requested
    asked = 1,     // the program's main thread has not done it yet
    released = 2,  // torch.cuda.empty_cache() has returned
    no_interpreter = 3,
    no_torch = 4,   // the program has not imported torch.cuda
    capturing = 5,  // a stream capture was under way, which freeing memory would have ended
    failed = 6,     // `reason` says why
};

struct ReleaseState {
    uint32_t release;  // Release
    uint32_t reserved;
    char reason[256];  // UTF-8, may be truncated
};
static_assert(sizeof(ReleaseState) == 264);

enum class Ask : uint32_t {
    look = 0,    // only return the state
    want = 1,    // wait for a safe point, until this connection ends
    answer = 2,  // `wish` has come to `outcome`; wish 0: of all that the image with `then` has
    pass = 3,    // threads at a safe point go on to the next one, where they are wanted, too
};

// phosd/include/phos.h has the numbers of `outcome` and `then`.
struct ProgramAsk {
    uint32_t ask;  // Ask
    int32_t outcome;
    uint32_t then;
    uint32_t reserved;
    uint64_t wish;
    char text[256];  // of a failure: the error's name, a colon and its message, UTF-8; of an image
                     // without `wish`: the name that was asked for, or nothing
};
static_assert(sizeof(ProgramAsk) == 280);

struct ProgramState {
    uint32_t declared;  // 1: the program has safe points
    uint32_t waiting;   // threads that wait in the hook, at a safe point or for their checkpoint
    uint32_t refused;   // 1: a callable of the program failed at the safe point; see `reason`
    uint32_t reserved;
    uint64_t wish;  // the checkpoint that threads ask for; 0: none
    char reason[256];
};
static_assert(sizeof(ProgramState) == 280);

// What the hook asks of phosd, at `program.sock` in its runtime directory, in a message of type
// `program`: a checkpoint of this process. The answer has no payload, or says why it is refused.
// `char name[name_size]` follows, the name of the image; without one it has that of the program.
struct ProgramWish {
    uint64_t wish;  // a number that the process uses once
    uint32_t then;
    uint32_t name_size;
};
static_assert(sizeof(ProgramWish) == 16);

// BlockIds: `uint64_t ids[count]` follows a Count; descriptors in the same order. What is handed
// back may be the parked memory, or another of the same size and device (after a restore).

}  // namespace phos::wire
