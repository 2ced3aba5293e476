#include "plan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace phos::mover {
namespace {

using board::kChunk;
using board::kSlotShift;
using board::kStateMask;
using board::kUrgent;
using board::State;

// A survey of 60,000 chunks takes 0.1 ms: what it found is good for so long, unless news came.
constexpr uint64_t kSurveyNs = 1'000'000;

}  // namespace

Plan::Plan(std::vector<View*> views, const uint32_t* devices, const BlockIn* blocks,
           uint32_t block_count, const uint8_t* wanted, const uint32_t* order, const SlabIn* slabs,
           uint32_t slab_count, uint32_t batch_count, double patience)
    : blocks_(new Block[block_count]),
      block_count_(block_count),
      batches_(batch_count),
      patience_ns_(static_cast<uint64_t>(patience * 1e9)),
      last_claim_ns_(board::now_ns()) {
    for (size_t i = 0; i < views.size(); ++i) boards_.push_back({views[i], devices[i], 0, 0});
    for (uint32_t i = 0; i < slab_count; ++i) {
        slabs_.push_back({slabs[i], row_of(slabs[i]), false});
        slots_ += slabs[i].slots;
    }
    for (uint32_t b = 0; b < block_count; ++b) {
        Block& block = blocks_[b];
        block.in = blocks[b];
        block.id = 0;
        block.first = static_cast<uint32_t>(chunks_.size());
        block.count = static_cast<uint32_t>((block.in.size + kChunk - 1) / kChunk);
        block.left = 0;
        block.freed = block.dropped = false;
        View* view = boards_[block.in.board].view;
        for (uint32_t i = 0; i < block.count; ++i) {
            const uint64_t at = i * kChunk;
            const bool is_wanted = wanted[block.first + i] != 0;
            chunks_.push_back({&view->word(block.in.first_chunk + i), block.in.address + at,
                               static_cast<uint32_t>(std::min(kChunk, block.in.size - at)), b, i,
                               is_wanted});
            if (is_wanted)
                ++block.left;
            else
                chunks_.back().word->store(State::saved, std::memory_order_release);
        }
        block.unsaved.store(block.left, std::memory_order_relaxed);
        left_ += block.left;
    }
    order_.reserve(left_);
    for (uint32_t i = 0; i < chunks_.size(); ++i)
        if (chunks_[i].wanted) order_.push_back(i);
    // 0, unknown, comes last; equal ones stay in the order of the blocks.
    std::stable_sort(order_.begin(), order_.end(),
                     [order](uint32_t a, uint32_t b) { return order[a] - 1 < order[b] - 1; });
    find_ids();
    for (Board& each : boards_) each.view->progressed();
}

void Plan::find_ids() {
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> by_chunk;
    for (uint32_t b = 0; b < block_count_; ++b)
        by_chunk[{blocks_[b].in.board, blocks_[b].in.first_chunk}] = b;
    for (uint32_t i = 0; i < boards_.size(); ++i) {
        for (uint32_t row = 0; row < boards_[i].view->block_count(); ++row) {
            const board::BlockRow& found = boards_[i].view->block(row);
            const auto at = by_chunk.find({i, found.first_chunk});
            if (at != by_chunk.end()) blocks_[at->second].id = found.id;
        }
    }
}

board::SlabRow* Plan::row_of(const SlabIn& slab) {
    View& view = *boards_[slab.board].view;
    uint32_t first = 0;
    for (uint32_t row = 0; row < view.slab_count(); ++row) {
        if (first == slab.first_slot) return &view.slab(row);
        first += view.slab(row).slots;
    }
    return nullptr;
}

Look Plan::look() {
    Look found{left_, 0, 0, 0, on_the_way_.load(std::memory_order_acquire)};
    bool news = !urgent_.empty();
    for (uint32_t i = 0; i < boards_.size(); ++i) {
        Board& each = boards_[i];
        auto& header = each.view->header();
        const uint32_t posted = header.posted.load(std::memory_order_acquire);
        news |= posted != each.posted;
        each.posted = posted;
        found.aborted |= header.phase.load(std::memory_order_acquire) == board::aborted;
        if (each.device >= board::kMaxDevices) continue;
        auto& pressure = header.pressure[each.device];
        each.level = pressure.wanted.load(std::memory_order_acquire);
        const uint32_t given = pressure.given.load(std::memory_order_relaxed);
        if (each.level > given) found.wanted = std::max(found.wanted, each.level);
        if (each.level < given) pressure.given.store(each.level, std::memory_order_release);
    }
    if (news) survey();
    found.urgent = static_cast<uint32_t>(urgent_.size());
    return found;
}

// Every chunk that is left, by the state of its word. A word is only the program's hint: what
// it says changes the order, never whether a chunk is saved.
void Plan::survey() {
    for (auto* list : {&urgent_, &late_, &shadowing_, &shadowed_, &orphaned_}) list->clear();
    for (uint32_t i = 0; i < boards_.size(); ++i) note_freed(i);
    surveyed_ns_ = board::now_ns();
    const bool all = cursor_ == order_.size();
    for (uint32_t b = 0; b < block_count_; ++b) {
        const Block& block = blocks_[b];
        if (block.left == 0) continue;
        for (uint32_t i = block.first; i < block.first + block.count; ++i) {
            if (!chunks_[i].wanted) continue;
            const uint32_t word = chunks_[i].word->load(std::memory_order_acquire);
            switch (word & kStateMask) {
                case State::pending:
                    if ((word & kUrgent) != 0)
                        urgent_.push_back(i);
                    else if (all || (freed_first_ && block.freed))
                        late_.push_back(i);
                    break;
                case State::shadowing:
                    shadowing_.push_back(i);
                    break;
                case State::shadowed:
                    shadowed_.push_back(i);
                    break;
                default:
                    orphaned_.push_back(i);
            }
        }
    }
}

void Plan::note_freed(uint32_t board) {
    std::vector<uint64_t> ids;
    if (!boards_[board].view->freed(ids) || ids.empty()) return;
    std::sort(ids.begin(), ids.end());
    for (uint32_t b = 0; b < block_count_; ++b) {
        Block& block = blocks_[b];
        if (block.in.board == board && std::binary_search(ids.begin(), ids.end(), block.id))
            block.freed = true;
    }
}

uint32_t Plan::claim(uint32_t number, uint32_t most, Claim* claims) {
    Batch& batch = batches_[number];
    batch.chunks.clear();
    batch.claimed_ns = board::now_ns();
    if (batch.claimed_ns - surveyed_ns_ >= kSurveyNs) survey();
    const auto room = [&] { return batch.chunks.size() < most; };
    const auto is_freed = [this](uint32_t i) { return blocks_[chunks_[i].block].freed; };
    const auto each = [&](const std::vector<uint32_t>& list, auto action) {
        for (uint32_t i : list)
            if (room() && chunks_[i].wanted) action(i);
    };
    const auto from_block = [&](uint32_t i) { take_pending(batch, i, claims); };
    const auto from_slot = [&](uint32_t i) { take_shadow(batch, i, claims); };

    if (freed_first_) {
        for (const auto* list : {&urgent_, &late_})
            each(*list, [&](uint32_t i) {
                if (is_freed(i)) from_block(i);
            });
        each(shadowed_, [&](uint32_t i) {
            if (is_freed(i)) from_slot(i);
        });
    }
    each(urgent_, from_block);
    const size_t used = shadowing_.size() + shadowed_.size();
    if (used * 4 > size_t{slots_} * 3) each(shadowed_, from_slot);
    for (; cursor_ < order_.size() && room(); ++cursor_) {
        const uint32_t i = order_[cursor_];
        if (chunks_[i].wanted && !is_freed(i)) from_block(i);  // freed ones do not change any more
    }
    each(late_, from_block);
    each(shadowed_, from_slot);
    if (batch.chunks.empty() && cursor_ == order_.size()) {
        each(orphaned_, [&](uint32_t i) { take_block(batch, i, claims); });
        if (batch.claimed_ns - last_claim_ns_ > patience_ns_) overdue_ = true;
        if (overdue_) each(shadowing_, from_slot);
    }
    if (!batch.chunks.empty()) {
        last_claim_ns_ = batch.claimed_ns;
        on_the_way_.fetch_add(1, std::memory_order_relaxed);
    }
    return static_cast<uint32_t>(batch.chunks.size());
}

bool Plan::claim_pending(uint32_t i) {
    uint32_t word = chunks_[i].word->load(std::memory_order_relaxed);
    while ((word & kStateMask) == State::pending) {
        // The bit stays: whoever set it may look for it.
        const uint32_t claimed = State::copying | (word & kUrgent);
        if (chunks_[i].word->compare_exchange_strong(word, claimed, std::memory_order_acq_rel))
            return true;
        if ((word & kUrgent) == 0) return false;  // it can have become urgent once
    }
    return false;
}

bool Plan::take_pending(Batch& batch, uint32_t i, Claim* claims) {
    if (!claim_pending(i)) return false;
    take(batch, i, chunks_[i].address, false, claims);
    return true;
}

void Plan::take_shadow(Batch& batch, uint32_t i, Claim* claims) {
    const uint32_t slot = chunks_[i].word->load(std::memory_order_acquire) >> kSlotShift;
    const uint32_t board = blocks_[chunks_[i].block].in.board;
    for (const Slab& slab : slabs_) {
        if (slab.in.board == board && slot - slab.in.first_slot < slab.in.slots && !slab.dropped) {
            const uint64_t at = slab.in.address + kChunk * (slot - slab.in.first_slot);
            return take(batch, i, at, true, claims);
        }
    }
    take_block(batch, i, claims);  // a slot that does not exist: the digest decides
}

void Plan::take_block(Batch& batch, uint32_t i, Claim* claims) {
    take(batch, i, chunks_[i].address, false, claims);
}

void Plan::take(Batch& batch, uint32_t i, uint64_t address, bool from_slot, Claim* claims) {
    Chunk& chunk = chunks_[i];
    claims[batch.chunks.size()] = {address, chunk.block, chunk.index, chunk.length, from_slot};
    batch.chunks.push_back(i);
    chunk.wanted = false;
    --blocks_[chunk.block].left;
    --left_;
}

void Plan::arrived(uint32_t number) {
    const Batch& batch = batches_[number];
    uint64_t touched = 0;  // boards, as bits; there are fewer than 64
    for (uint32_t i : batch.chunks) {
        Block& block = blocks_[chunks_[i].block];
        chunks_[i].word->store(State::saved, std::memory_order_release);
        block.unsaved.fetch_sub(1, std::memory_order_release);
        touched |= 1ull << (block.in.board % 64);
    }
    for (size_t b = 0; b < boards_.size(); ++b)
        if ((touched >> (b % 64) & 1) != 0) boards_[b].view->progressed();
    {
        const std::lock_guard lock(mutex_);
        durations_.push_back(board::now_ns() - batch.claimed_ns);
    }
    on_the_way_.fetch_sub(1, std::memory_order_release);
}

void Plan::wait(double seconds) {
    if (boards_.size() == 1) {
        boards_[0].view->wait_posted(boards_[0].posted, seconds);
        return;
    }
    const timespec pause = {0, static_cast<long>(seconds * 1e9)};
    nanosleep(&pause, nullptr);
}

void Plan::abort() {
    for (Board& each : boards_) each.view->set_phase(board::aborted);
}

bool Plan::droppable(bool all, uint32_t* blocks, uint32_t* block_count, uint32_t* slabs,
                     uint32_t* slab_count) {
    *block_count = *slab_count = 0;
    bool complete = true;
    for (uint32_t i = 0; i < boards_.size(); ++i) note_freed(i);
    for (uint32_t b = 0; b < block_count_; ++b) {
        Block& block = blocks_[b];
        if (!block.freed || block.dropped) continue;
        if (!all && block.unsaved.load(std::memory_order_acquire) != 0) {
            complete = false;
            continue;
        }
        block.dropped = true;
        blocks[(*block_count)++] = b;
    }
    for (uint32_t s = 0; s < slabs_.size(); ++s) {
        Slab& slab = slabs_[s];
        const bool released =
            slab.row != nullptr && slab.row->released.load(std::memory_order_acquire) != 0;
        if (slab.dropped || !(all || released)) continue;
        slab.dropped = true;
        slots_ -= slab.in.slots;
        slabs[(*slab_count)++] = s;
    }
    return complete;
}

void Plan::answer() {
    for (Board& each : boards_) {
        if (each.device >= board::kMaxDevices || each.level == 0) continue;
        auto& pressure = each.view->header().pressure[each.device];
        pressure.given.store(each.level, std::memory_order_release);
        each.view->progressed();
    }
}

Saving Plan::saving() {
    const std::lock_guard lock(mutex_);
    if (durations_.empty()) return {0, 0};
    const auto middle = durations_.begin() + static_cast<std::ptrdiff_t>(durations_.size() / 2);
    std::nth_element(durations_.begin(), middle, durations_.end());
    return {*middle, *std::max_element(durations_.begin(), durations_.end())};
}

}  // namespace phos::mover
