"""Let GPUs exchange what they compute, one process for each, in ways that differ below NCCL.

    python collectives.py WAY [--ranks 2] [--port N]
    torchrun --nproc-per-node 2 collectives.py WAY

``groups``: many communicators (all ranks, each pair of neighbours, streams of high priority, gloo
beside them), with sends and receives in a ring, all-to-all, reduce-scatter and all-gather.
``captured``: an all-reduce in a CUDA graph. ``symmetric``: PyTorch's symmetric memory, whose
kernels wait for the peers and write into their memory. ``nvshmem``: the same by NVSHMEM, which
has a heap of its own in each GPU.

Without torchrun the process that starts the ranks asks how many GPUs there are, and does nothing
else with them.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import ranks
import torch
import torch.distributed as dist

_COUNT = 1 << 22


def _start(rank: int) -> torch.Tensor:
    chance = torch.Generator(device="cuda").manual_seed(rank)
    return torch.randn(_COUNT, device="cuda", generator=chance)


def _everywhere(value: torch.Tensor) -> float:
    """Return the sum of all ranks' sums."""
    total = value.double().sum()
    dist.all_reduce(total)
    return float(total)


def grouped(rank: int, count: int) -> Iterator[float]:
    urgent: Any = dist.ProcessGroupNCCL.Options()
    urgent.is_high_priority_stream = True
    fast, hosts = dist.new_group(pg_options=urgent), dist.new_group(backend="gloo")
    pairs = [dist.new_group(sorted({at, (at + 1) % count})) for at in range(count)]
    own, mixed = _start(rank), _start(rank + count)
    before, after = (rank - 1) % count, (rank + 1) % count
    while True:
        received = torch.empty_like(own)
        ring = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        own = (5.1 * own + 2.7 * received).sin()
        exchanged = torch.empty_like(mixed)
        dist.all_to_all_single(exchanged, mixed)
        mixed = (3.7 * exchanged).cos()
        dist.all_reduce(own, op=dist.ReduceOp.AVG, group=fast)
        for first, pair in enumerate(pairs):
            if rank in (first, (first + 1) % count):
                dist.broadcast(mixed[first * 1024 : (first + 1) * 1024], first, pair)
        part = torch.empty(_COUNT // count, device="cuda")
        dist.reduce_scatter_tensor(part, mixed[: len(part) * count])
        whole = torch.empty(len(part) * count, device="cuda")
        dist.all_gather_into_tensor(whole, part.tanh())
        own[: len(whole)] += 0.01 * whole
        total = (own.double().sum() + mixed.double().sum()).cpu()
        dist.all_reduce(total, group=hosts)
        yield float(total)


def captured(rank: int, count: int) -> Iterator[float]:
    own = _start(rank)

    def step() -> None:
        own.mul_(5.1).sin_()
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        own.add_(0.1 * (rank + 1))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    while True:
        for _ in range(20):
            graph.replay()
        yield _everywhere(own)


def symmetric(rank: int, count: int) -> Iterator[float]:
    from torch.distributed import _symmetric_memory as memory

    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    shared = memory.empty(_COUNT, dtype=torch.float32, device=torch.device("cuda", rank))
    handle = memory.rendezvous(shared, group)
    shared.copy_(_start(rank))
    peer = handle.get_buffer((rank + 1) % count, (_COUNT,), torch.float32)
    own = _start(rank + count)
    while True:
        shared.copy_((0.9 * shared + own).sin())
        handle.barrier(channel=0)
        total = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)
        handle.barrier(channel=1)
        peer[: _COUNT // 2].add_(own[: _COUNT // 2], alpha=1e-3)
        handle.barrier(channel=2)
        own = (own + total).cos()
        yield _everywhere(own) + _everywhere(shared)


def put(rank: int, count: int) -> Iterator[float]:
    from torch.distributed import _symmetric_memory as memory

    memory.set_backend("NVSHMEM")
    assert dist.group.WORLD is not None
    group, device = dist.group.WORLD.group_name, torch.device("cuda", rank)
    shared, received = (memory.empty(_COUNT, dtype=torch.float32, device=device) for _ in range(2))
    for each in (shared, received):
        memory.rendezvous(each, group)
    shared.copy_(_start(rank))
    own = _start(rank + count)
    while True:
        shared.copy_((0.9 * shared + own).sin())
        torch.ops.symm_mem.nvshmem_all_to_all(shared, received, group)
        own = (own + received).cos()
        yield _everywhere(own) + _everywhere(shared)


_WAYS: dict[str, ranks.Values] = {
    "groups": grouped,
    "captured": captured,
    "symmetric": symmetric,
    "nvshmem": put,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=_WAYS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29514)
    arguments = parser.parse_args()
    # The driver saves no multicast objects, which symmetric memory makes where it can.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if "RANK" not in os.environ and torch.cuda.device_count() < arguments.ranks:
        sys.exit(f"not here: needs {arguments.ranks} GPUs")
    ranks.run(_WAYS[arguments.way], arguments.ranks, arguments.port)


if __name__ == "__main__":
    main()
