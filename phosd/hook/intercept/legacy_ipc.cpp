#include "intercept/legacy_ipc.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/channel.h"
#include "base/descriptors.h"
#include "base/log.h"
#include "base/overrides.h"
#include "base/process.h"
#include "gate/gate.h"
#include "memory/blocks.h"
#include "memory/contexts.h"
#include "memory/event_words.h"
#include "memory/heap.h"
#include "park/reexport.h"

namespace phos {
namespace {

using legacy_ipc::kEventMagic;
using legacy_ipc::kMemoryMagic;
using legacy_ipc::Ticket;

constexpr uint16_t kAskForMemory = 0x100;  // apart from the types of the engine's protocol
constexpr long kPause = 10'000'000;        // nanoseconds between two requests
// Nanoseconds to wait for an owner that does not listen. It may be detached for a dump, and will
// come back; or it may have become another program by exec(), which cannot be seen from outside.
constexpr uint64_t kDetached = 600'000'000'000;
// For a process that has the owner's pid but another start time: it is unrelated, or it was
// restored, and its hook will listen soon.
constexpr uint64_t kStranger = 5'000'000'000;

using Owner = std::tuple<int32_t, uint64_t, uint64_t>;  // pid, nonce, block

// A block of a peer, mapped here once for all its open allocations, or for all its events.
struct Mapped {
    uint64_t address;
    uint64_t size;
    bool words;
    unsigned views;
};
struct View {
    uint64_t size;
    unsigned opened;
    Owner owner;
};

std::atomic<int> socket_now{-1};
std::map<Owner, Mapped> mapped;  // guarded by blocks::mutex
std::map<uint64_t, View> views;  // by address; guarded by blocks::mutex

uint64_t own_nonce() {
    static const uint64_t nonce = [] {
        uint64_t value = 0;
        return getrandom(&value, sizeof value, 0) == sizeof value ? value : 0;
    }();
    return nonce;
}

std::string socket_name(int pid, uint64_t nonce) {
    char name[64];
    std::snprintf(name, sizeof name, "phos-ipc-%d-%016lx", pid, static_cast<unsigned long>(nonce));
    return name;
}

// The name for a copy of a process. That has the pid and the nonce, too, in a pid namespace of its
// own, and names are in one place for all of these.
std::string name_of_copy(int pid, uint64_t nonce) {
    struct stat space{};
    stat("/proc/self/ns/pid", &space);
    return socket_name(pid, nonce) + "-" + std::to_string(space.st_ino);
}

// Returns a connection to the owner, or -1, with ECONNREFUSED if it does not listen.
int reach(const Ticket& ticket) {
    const int copy = channel::connect_abstract(name_of_copy(ticket.pid, ticket.nonce), ticket.pid);
    if (copy >= 0 || errno != ECONNREFUSED) return copy;
    const int peer = channel::connect_abstract(socket_name(ticket.pid, ticket.nonce), ticket.pid);
    if (peer < 0 && errno == EACCES) errno = ECONNREFUSED;  // one of which ours is a copy
    return peer;
}

enum class Answer { given, refused, parked, silent };

// Asks the owner once for a descriptor of the block.
Answer ask(const Ticket& ticket, int* descriptor) {
    const int peer = reach(ticket);
    if (peer < 0) return errno == ECONNREFUSED ? Answer::silent : Answer::refused;
    const wire::Header header{
        wire::kMagic, wire::kVersion, kAskForMemory, 0, 0, sizeof ticket.block, 0};
    channel::Message message;
    Answer answer = Answer::silent;  // also if it detaches, or is stopped, in the middle
    if (channel::send(peer, header, &ticket.block, {}) && channel::receive(peer, &message)) {
        const bool busy = message.header.status == static_cast<uint32_t>(wire::Status::busy);
        answer = busy ? Answer::parked : Answer::refused;
        if (message.descriptors.size() == 1) {
            *descriptor = message.descriptors[0];
            answer = Answer::given;
        }
    }
    for (const int other : message.descriptors)
        if (answer != Answer::given || other != *descriptor) descriptors::release(other);
    descriptors::release(peer);
    return answer;
}

// Returns whether an owner that does not answer may still do so.
bool may_come_back(const Ticket& ticket, uint64_t silent_since) {
    const uint64_t found = began(ticket.pid);
    const uint64_t patience = found == ticket.began ? kDetached : kStranger;
    return found && monotonic_ns() - silent_since < patience;
}

// Maps a block of memory, which is dropped on failure.
CUresult map_memory(blocks::Block* block, uint64_t address, uint64_t size, int device) {
    CUresult result = blocks::map(block, address, size, 0);
    if (result != CUDA_SUCCESS) {
        blocks::drop_if_unused(block);
        return result;
    }
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device},
                                 CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    result = blocks::set_access(address, size, &access, 1);
    if (result != CUDA_SUCCESS) blocks::unmap(address, size);
    return result;
}

// Imports and maps a peer's block. Takes over the descriptor.
CUresult map_block(const Ticket& ticket, int descriptor, int device, uint64_t* address) {
    CUmemGenericAllocationHandle real = 0;
    CUresult result = driver.cuMemImportFromShareableHandle(
        &real, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS) {
        descriptors::release(descriptor);
        return result;
    }
    CUmemAllocationProp properties{};
    driver.cuMemGetAllocationPropertiesFromHandle(&properties, real);
    blocks::Block* block = blocks::adopt(real, properties, ticket.block_size, wire::kImported);
    block->borrowed = true;
    block->descriptor = descriptor;
    CUdeviceptr at = 0;
    result = driver.cuMemAddressReserve(&at, ticket.block_size, 0, 0, 0);
    if (result != CUDA_SUCCESS) {
        blocks::drop_if_unused(block);
        return result;
    }
    result = ticket.magic == kEventMagic ? event_words::map(block, at, ticket.block_size, device)
                                         : map_memory(block, at, ticket.block_size, device);
    if (result == CUDA_SUCCESS)
        *address = at;
    else
        driver.cuMemAddressFree(at, ticket.block_size);
    return result;
}

// Tries once. `answer` is the owner's answer if it was not the memory.
CUresult open_ticket(const Ticket& ticket, CUdeviceptr* address, std::optional<int> gpu,
                     Answer* answer) {
    const gate::Pass pass;
    *answer = Answer::given;
    CUcontext context = nullptr;
    int device = gpu.value_or(0);
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    // As without the hook: a process cannot open its own memory.
    if ((!gpu && !contexts::current(&context, &device)) || ticket.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ticket.offset > ticket.block_size || ticket.size > ticket.block_size - ticket.offset)
        return CUDA_ERROR_INVALID_VALUE;
    const Owner owner{ticket.pid, ticket.nonce, ticket.block};
    const bool words = ticket.magic == kEventMagic;
    std::unique_lock lock(blocks::mutex);
    if (!mapped.count(owner)) {
        lock.unlock();
        int descriptor = -1;
        *answer = ask(ticket, &descriptor);
        if (*answer != Answer::given) return CUDA_ERROR_INVALID_VALUE;
        lock.lock();
        if (mapped.count(owner)) {
            descriptors::release(descriptor);  // another thread was first
        } else {
            uint64_t base = 0;
            const CUresult result = map_block(ticket, descriptor, device, &base);
            if (result != CUDA_SUCCESS) return result;
            mapped[owner] = Mapped{base, ticket.block_size, words, 0};
        }
    }
    Mapped& block = mapped.at(owner);
    // Another ticket for the same block was believed; this one may be forged.
    if (block.words != words || ticket.block_size != block.size) return CUDA_ERROR_INVALID_VALUE;
    const uint64_t at = block.address + ticket.offset;
    if (words) {
        *address = at;
        return CUDA_SUCCESS;
    }
    const auto [view, fresh] = views.try_emplace(at, View{ticket.size, 0, owner});
    block.views += fresh;
    ++view->second.opened;
    *address = at;
    return CUDA_SUCCESS;
}

CUresult native(CUresult result) {
    if (result == CUDA_SUCCESS)
        mark_unsupported(Reason::legacy_ipc,
                         "the program shares memory by legacy CUDA IPC with a process that has no "
                         "hook");
    return result;
}

// Callback for reexport::sharing.
CUresult share(CUipcMemHandle* handle, CUdeviceptr address, uint64_t* to_reexport) {
    const gate::Pass pass;
    std::unique_lock lock(blocks::mutex);
    const auto* found = heap::find(address);
    if (!found) {
        lock.unlock();
        return native(driver.cuIpcGetMemHandle(handle, address));
    }
    if (!found->second.heap->context) return CUDA_ERROR_INVALID_VALUE;  // a pool's, as natively
    Ticket ticket{};
    const CUresult result = legacy_ipc::issue(kMemoryMagic, *found, &ticket, to_reexport);
    if (result != CUDA_SUCCESS) return result;
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &ticket, sizeof ticket);
    return CUDA_SUCCESS;
}

}  // namespace

CUresult overrides::cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    return reexport::sharing([=](uint64_t* id) { return share(handle, address, id); });
}

CUresult overrides::cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle,
                                          unsigned flags) {
    Ticket ticket{};
    std::memcpy(&ticket, &handle, sizeof ticket);
    if (ticket.magic != kMemoryMagic) {
        const gate::Pass pass;
        return native(driver.cuIpcOpenMemHandle_v2(address, handle, flags));
    }
    return legacy_ipc::open(ticket, address);
}

CUresult overrides::cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle,
                                       unsigned flags) {
    return overrides::cuIpcOpenMemHandle_v2(address, handle, flags);
}

CUresult overrides::cuIpcCloseMemHandle(CUdeviceptr address) {
    const gate::Pass pass;
    {
        const std::lock_guard lock(blocks::mutex);
        const auto view = views.find(address);
        if (view == views.end()) return driver.cuIpcCloseMemHandle(address);
        if (view->second.opened > 1) {
            --view->second.opened;
            return CUDA_SUCCESS;
        }
    }
    const CUresult result = driver.cuCtxSynchronize();  // nothing may use what is unmapped
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    return legacy_ipc::close(address);
}

namespace legacy_ipc {

Ticket ticket(uint64_t magic, const blocks::Block& block, uint64_t offset, uint64_t size) {
    return {magic, own_nonce(), block.id, block.size, offset, size, began(getpid()), getpid(), 0};
}

CUresult issue(uint64_t magic, const std::pair<const uint64_t, heap::Allocation>& found,
               Ticket* made, uint64_t* to_reexport) {
    const auto* mapping = blocks::find(found.first);
    blocks::Block& block = *mapping->second.block;
    if (blocks::needs_reexport(block)) {
        *to_reexport = block.id;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (block.descriptor < 0) {
        int descriptor = -1;
        const CUresult result = blocks::export_descriptor(block, &descriptor);
        if (result != CUDA_SUCCESS) return result;
        block.descriptor = descriptors::keep(descriptor);
    }
    block.flags |= wire::kExported;
    *made = ticket(magic, block, found.first - mapping->first, found.second.size);
    return CUDA_SUCCESS;
}

CUresult close(uint64_t address) {
    const auto view = views.find(address);
    if (view == views.end()) return CUDA_ERROR_INVALID_VALUE;
    if (--view->second.opened) return CUDA_SUCCESS;
    const auto block = mapped.find(view->second.owner);
    views.erase(view);
    if (--block->second.views) return CUDA_SUCCESS;
    const Mapped gone = block->second;
    mapped.erase(block);
    const CUresult unmapped = blocks::unmap(gone.address, gone.size);
    return unmapped == CUDA_SUCCESS ? driver.cuMemAddressFree(gone.address, gone.size) : unmapped;
}

CUresult open(const Ticket& ticket, CUdeviceptr* address, std::optional<int> gpu) {
    const KeepErrno keep;
    uint64_t silent_since = 0;
    for (;;) {
        // Each try passes the gate again: while this thread waits for a parked owner, it must not
        // keep this process from being parked, too.
        Answer answer;
        const CUresult result = open_ticket(ticket, address, gpu, &answer);
        if (answer == Answer::given) return result;
        if (answer != Answer::silent)
            silent_since = 0;
        else if (!silent_since)
            silent_since = monotonic_ns();
        if (answer == Answer::refused ||
            (answer == Answer::silent && !may_come_back(ticket, silent_since))) {
            log::note("process %d gives nothing for its IPC handle", ticket.pid);
            return result;
        }
        pause_for(kPause);
    }
}

int listener() {
    return socket_now;
}

void serve(int peer) {
    channel::Message request;
    wire::Header reply{wire::kMagic, wire::kVersion, kAskForMemory | wire::kReply, 0, 0, 0, 0};
    std::vector<int> given;
    uint64_t id = 0;
    if (channel::receive(peer, &request) && request.header.type == kAskForMemory &&
        request.payload.size() == sizeof id) {
        std::memcpy(&id, request.payload.data(), sizeof id);
        const std::lock_guard lock(blocks::mutex);
        const auto found = blocks::by_id.find(id);
        if (found == blocks::by_id.end() || !(found->second.flags & wire::kExported)) {
            reply.status = static_cast<uint32_t>(wire::Status::bad_message);
        } else if (found->second.descriptor < 0) {
            reply.status = static_cast<uint32_t>(wire::Status::busy);  // parked
        } else {
            given.push_back(found->second.descriptor);
            reply.descriptors = 1;
        }
        channel::send(peer, reply, nullptr, given);
    }
    for (const int descriptor : request.descriptors) descriptors::release(descriptor);
    descriptors::release(peer);
}

void attach() {
    if (!own_nonce() || channel::overrun()) return;
    int listening = channel::listen_abstract(socket_name(getpid(), own_nonce()));
    if (listening < 0 && errno == EADDRINUSE)
        listening = channel::listen_abstract(name_of_copy(getpid(), own_nonce()));
    socket_now = listening;
}

void detach() {
    if (socket_now >= 0) channel::stop_listening(socket_now);
    socket_now = -1;
}

bool range_of(uint64_t address, uint64_t* start, uint64_t* size) {
    auto view = views.upper_bound(address);
    if (view == views.begin()) return false;
    --view;
    if (address - view->first >= view->second.size) return false;
    *start = view->first;
    *size = view->second.size;
    return true;
}

}  // namespace legacy_ipc
}  // namespace phos
