// The special registers of a block's threads.
#include <algorithm>

#include "block.h"

namespace phos::ptx {

void BlockRunner::set_fixed_specials(uint32_t grid) {
    const Dim3 &block = launch_.block, &extent = launch_.grid, &cluster = launch_.cluster;
    const auto value = [&](Special which, uint32_t lane, uint32_t warp) -> uint32_t {
        const uint32_t thread = warp * kLanes + lane;
        switch (which) {
            case Special::tid_x:
                return thread % block.x;
            case Special::tid_y:
                return thread / block.x % block.y;
            case Special::tid_z:
                return thread / block.x / block.y;
            case Special::ntid_x:
                return block.x;
            case Special::ntid_y:
                return block.y;
            case Special::ntid_z:
                return block.z;
            case Special::nctaid_x:
                return extent.x;
            case Special::nctaid_y:
                return extent.y;
            case Special::nctaid_z:
                return extent.z;
            case Special::nclusterid_x:
                return extent.x / cluster.x;
            case Special::nclusterid_y:
                return extent.y / cluster.y;
            case Special::nclusterid_z:
                return extent.z / cluster.z;
            case Special::cluster_nctaid_x:
                return cluster.x;
            case Special::cluster_nctaid_y:
                return cluster.y;
            case Special::cluster_nctaid_z:
                return cluster.z;
            case Special::cluster_nctarank:
                return cluster.x * cluster.y * cluster.z;
            case Special::laneid:
                return lane;
            case Special::warpid:
                return warp;
            case Special::nwarpid:
                return static_cast<uint32_t>(warps_.size());
            case Special::nsmid:
                return 1;
            case Special::gridid:
                return grid;
            case Special::lanemask_eq:
                return 1u << lane;
            case Special::lanemask_lt:
                return (1u << lane) - 1;
            case Special::lanemask_le:
                return (2u << lane) - 1;
            case Special::lanemask_ge:
                return ~0u << lane;
            case Special::lanemask_gt:
                return ~1u << lane;
            case Special::dynamic_smem_size:
                return static_cast<uint32_t>(launch_.dynamic_shared_bytes);
            case Special::total_smem_size:
                return static_cast<uint32_t>(state_.shared_bytes);
            default:
                return 0;  // set for each block
        }
    };
    for (uint32_t w = 0; w < warps_.size(); ++w)
        for (const auto& [which, slot] : program_.specials)
            for (uint32_t lane = 0; lane < kLanes; ++lane)
                warps_[w].slot<uint32_t>(slot)[lane] = value(which, lane, w);
}

void BlockRunner::set_block_specials() {
    const Dim3& cluster = launch_.cluster;
    const Dim3 inside{index_.x % cluster.x, index_.y % cluster.y, index_.z % cluster.z};
    for (const auto& [which, slot] : program_.specials) {
        uint32_t value = 0;
        switch (which) {
            case Special::ctaid_x:
                value = index_.x;
                break;
            case Special::ctaid_y:
                value = index_.y;
                break;
            case Special::ctaid_z:
                value = index_.z;
                break;
            case Special::clusterid_x:
                value = index_.x / cluster.x;
                break;
            case Special::clusterid_y:
                value = index_.y / cluster.y;
                break;
            case Special::clusterid_z:
                value = index_.z / cluster.z;
                break;
            case Special::cluster_ctaid_x:
                value = inside.x;
                break;
            case Special::cluster_ctaid_y:
                value = inside.y;
                break;
            case Special::cluster_ctaid_z:
                value = inside.z;
                break;
            case Special::cluster_ctarank:
                value = inside.x + cluster.x * (inside.y + cluster.y * inside.z);
                break;
            case Special::frame:
                break;
            default:
                continue;
        }
        for (Warp& warp : warps_) std::fill_n(warp.slot<uint32_t>(slot), kLanes, value);
    }
}

}  // namespace phos::ptx
