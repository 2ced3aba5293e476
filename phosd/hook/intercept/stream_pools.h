// Stream-ordered memory that nobody uses any more, given back when there is an occasion.
#pragma once

namespace phos::stream_pools {

// Gives back all that has been freed and is past its event, before a checkpoint, which need not
// save it then. Nothing at a closed gate, or while another thread has the lock.
void give_back_all();

}  // namespace phos::stream_pools
