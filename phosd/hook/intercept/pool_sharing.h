// Share stream-ordered pools between processes, where the hook backs them.
#pragma once

#include <cstdint>
#include <optional>

#include "base/driver.h"
#include "memory/stream_frees.h"

namespace phos::pool_sharing {

// Gives an imported pool's memory access rights, also what is imported from it later. Needs a
// gate::Pass and blocks::mutex.
CUresult change_access(CUmemoryPool pool, const CUmemAccessDesc* access, size_t count);

// Frees memory that was imported from a pool, as cuMemFree does. Nothing for another address.
std::optional<CUresult> free(uint64_t address);

// For cuMemFreeAsync: whether memory was imported from a pool, and freeing it after the event. They
// take blocks::mutex.
bool is_import(uint64_t address);
void free_after(uint64_t address, const stream_frees::StreamKey& stream, CUevent event);

}  // namespace phos::pool_sharing
