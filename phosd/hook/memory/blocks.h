// Every physical block of the process that the hook owns, and its mappings. The program gets
// handles made by the hook, so that the memory behind them can be replaced.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "base/driver.h"
#include "protocol/wire.h"

namespace phos::blocks {

struct Block {
    uint64_t id;
    uint64_t number;  // of the program's handle: the block's first id
    uint64_t size;    // bytes; of an import, as much as was ever mapped
    CUmemAllocationProp properties;
    CUmemAllocationHandleType asked;  // the handle types that the program asked for
    CUmemGenericAllocationHandle handle;
    uint32_t flags;           // wire::BlockFlags, all but kHasDescriptor
    bool present = true;      // false while parked
    bool borrowed = false;    // an import: the driver does not export it again
    bool foreign = false;     // saved by the driver: cannot be exported, or is no memory
    bool handed_out = false;  // a client has, or had, a descriptor of it
    int descriptor = -1;      // kept only if the program exports or imports the block
    int home = -1;            // for words of events, in host memory: a device that reaches them
    uint32_t references = 0;  // handles that the program holds
    std::set<uint64_t> mappings;

    int device() const {
        return properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE ? properties.location.id
                                                                       : home;
    }
    bool exportable() const { return descriptor >= 0 || (present && !borrowed); }
};

struct Mapping {
    uint64_t size;
    uint64_t offset;
    Block* block;
    std::vector<CUmemAccessDesc> access;
    uint64_t buffer_id = 0;  // by which the program knows it; 0 until its memory is replaced
};

// Guards the tables. Taken after passing the gate, and never held while waiting for the device.
extern std::mutex mutex;
extern std::map<uint64_t, Block> by_id;
extern std::map<uint64_t, Mapping> by_address;
extern uint64_t last_id;
extern uint64_t freed;
extern bool mapped;  // false from a park to the end of the unpark: no mapping can be read

// All of these need the lock.
CUresult create(const CUmemAllocationProp& properties, uint64_t size, uint32_t flags, Block** made);
CUresult create_another(const Block& block, CUmemGenericAllocationHandle* handle);  // like its own
Block* adopt(CUmemGenericAllocationHandle handle, const CUmemAllocationProp& properties,
             uint64_t size, uint32_t flags);
void drop_if_unused(Block* block);
// Gives the block a new id, from which clients know that its memory was replaced. The program does
// not notice.
void renew(Block& block);
CUresult map(Block* block, uint64_t address, uint64_t size, uint64_t offset,
             unsigned long long flags = 0);
CUresult map_again(uint64_t address, const Mapping& mapping);  // as it was, after an unmapping
CUresult unmap(uint64_t address, uint64_t size);
CUresult set_access(uint64_t address, uint64_t size, const CUmemAccessDesc* access, size_t count);
std::pair<const uint64_t, Mapping>* find(uint64_t address);
// Sets the memory that a pointer to `address` can reach: the mapping that contains it, and the
// program's own mappings that adjoin it, since an allocation may span them. False if there is none.
bool extent_of(uint64_t address, uint64_t* begin, uint64_t* end);

// Returns whether the block is an import because of a checkpoint: the program cannot share it as
// is.
bool needs_reexport(const Block& block);

// Returns a descriptor of the block for the caller to close; a kept one is duplicated.
CUresult export_descriptor(const Block& block, int* descriptor);

// Notes the ids by which the program knows the block's mappings, before other memory takes its
// place: each new mapping has another. Libraries know by it what they have registered with network
// cards.
void keep_buffer_ids(const Block& block);

// The program's handle of a block, and the reverse: null for a handle that is not the hook's.
CUmemGenericAllocationHandle virtual_handle(const Block& block);
Block* behind(CUmemGenericAllocationHandle handle);

}  // namespace phos::blocks
