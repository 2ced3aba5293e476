// What phosd/engine/mover/worker/plan.py calls.
#include <cerrno>

#include "plan.h"

using namespace phos::mover;

namespace {

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
PHOS_EXPORT Plan* phos_plan_create(View* const* views, const uint32_t* devices, uint32_t view_count,
                                   const BlockIn* blocks, uint32_t block_count,
                                   const uint8_t* wanted, const uint32_t* order,
                                   const SlabIn* slabs, uint32_t slab_count, uint32_t batch_count,
                                   double patience) {
    std::vector<View*> boards(views, views + view_count);
    if (!fits(boards, blocks, block_count, slabs, slab_count)) {
        errno = EINVAL;
        return nullptr;
    }
    return new Plan(std::move(boards), devices, blocks, block_count, wanted, order, slabs,
                    slab_count, batch_count, patience);
}

PHOS_EXPORT void phos_plan_close(Plan* plan) {
    delete plan;
}

PHOS_EXPORT void phos_plan_look(Plan* plan, Look* look) {
    *look = plan->look();
}

PHOS_EXPORT uint32_t phos_plan_claim(Plan* plan, uint32_t batch, uint32_t most, Claim* claims) {
    return plan->claim(batch, most, claims);
}

PHOS_EXPORT void phos_plan_arrived(Plan* plan, uint32_t batch) {
    plan->arrived(batch);
}

PHOS_EXPORT void phos_plan_wait(Plan* plan, double seconds) {
    plan->wait(seconds);
}

PHOS_EXPORT void phos_plan_abort(Plan* plan) {
    plan->abort();
}

PHOS_EXPORT void phos_plan_freed_first(Plan* plan) {
    plan->freed_first();
}

PHOS_EXPORT int phos_plan_droppable(Plan* plan, int all, uint32_t* blocks, uint32_t* block_count,
                                    uint32_t* slabs, uint32_t* slab_count) {
    return plan->droppable(all != 0, blocks, block_count, slabs, slab_count);
}

PHOS_EXPORT void phos_plan_answer(Plan* plan) {
    plan->answer();
}

PHOS_EXPORT void phos_plan_saving(Plan* plan, Saving* saving) {
    *saving = plan->saving();
}
