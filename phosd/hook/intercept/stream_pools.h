// Free stream-ordered memory that is no longer used, when there is an opportunity.
#pragma once

namespace phos::stream_pools {

// Frees all memory that was freed on streams and is past its event, so that a checkpoint need not
// save it. Does nothing at a closed gate, or while another thread holds the lock.
void give_back_all();

}  // namespace phos::stream_pools
