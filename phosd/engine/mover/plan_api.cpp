// What phosd/engine/mover/plan.py calls.
#include <cerrno>

#include "plan.h"

using namespace phos::mover;

namespace {

struct Order {
    Plan plan;
    // What a stream's host function is given: which batch of which plan.
    struct Tag {
        Plan* plan;
        uint32_t batch;
    };
    std::vector<Tag> tags;
};

bool fits(const std::vector<View*>& views, const BlockIn* blocks, uint32_t block_count,
          const SlabIn* slabs, uint32_t slab_count) {
    for (uint32_t i = 0; i < block_count; ++i) {
        const BlockIn& block = blocks[i];
        if (block.board >= views.size()) return false;
        const uint64_t count = (block.size + phos::board::kChunk - 1) / phos::board::kChunk;
        if (block.first_chunk + count > views[block.board]->chunk_count()) return false;
    }
    for (uint32_t i = 0; i < slab_count; ++i)
        if (slabs[i].board >= views.size()) return false;
    return true;
}

}  // namespace

// Null when a block is not on its board.
PHOS_EXPORT Order* phos_plan_create(View* const* views, const uint32_t* devices,
                                    uint32_t view_count, const BlockIn* blocks,
                                    uint32_t block_count, const uint8_t* wanted,
                                    const uint32_t* order, const SlabIn* slabs, uint32_t slab_count,
                                    uint32_t batch_count, double patience) {
    std::vector<View*> boards(views, views + view_count);
    if (!fits(boards, blocks, block_count, slabs, slab_count)) {
        errno = EINVAL;
        return nullptr;
    }
    auto* made = new Order{{std::move(boards), devices, blocks, block_count, wanted, order, slabs,
                            slab_count, batch_count, patience},
                           {}};
    for (uint32_t i = 0; i < batch_count; ++i) made->tags.push_back({&made->plan, i});
    return made;
}

// No stream may hold a tag any more.
PHOS_EXPORT void phos_plan_close(Order* order) {
    delete order;
}

PHOS_EXPORT void phos_plan_look(Order* order, Look* look) {
    *look = order->plan.look();
}

PHOS_EXPORT uint32_t phos_plan_claim(Order* order, uint32_t batch, uint32_t most, Claim* claims) {
    return order->plan.claim(batch, most, claims);
}

PHOS_EXPORT void* phos_plan_tag(Order* order, uint32_t batch) {
    return &order->tags[batch];
}

// A host function of CUDA: it runs on the driver's thread, without the interpreter.
PHOS_EXPORT void phos_plan_staged(void* tag) {
    const auto* batch = static_cast<const Order::Tag*>(tag);
    batch->plan->staged(batch->batch);
}

PHOS_EXPORT void phos_plan_wait(Order* order, double seconds) {
    order->plan.wait(seconds);
}

PHOS_EXPORT void phos_plan_abort(Order* order) {
    order->plan.abort();
}

PHOS_EXPORT void phos_plan_freed_first(Order* order) {
    order->plan.freed_first();
}

PHOS_EXPORT int phos_plan_droppable(Order* order, int all, uint32_t* blocks, uint32_t* block_count,
                                    uint32_t* slabs, uint32_t* slab_count) {
    return order->plan.droppable(all != 0, blocks, block_count, slabs, slab_count);
}

PHOS_EXPORT void phos_plan_answer(Order* order) {
    order->plan.answer();
}

PHOS_EXPORT void phos_plan_saving(Order* order, Saving* saving) {
    *saving = order->plan.saving();
}
