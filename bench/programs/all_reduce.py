"""Sum a tensor over the ranks again and again with NCCL; the first rank prints the bandwidths.

torchrun --nproc-per-node 2 all_reduce.py [--bytes N] [--rounds N] [--repeat N]

A line for each round: the bus bandwidth in GB/s, as NCCL's own tests define it for an all-reduce:
``bytes / seconds * 2 (ranks - 1) / ranks``.
"""

import argparse
import os

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=20, help="all-reduces in a round")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    tensor = torch.randn(arguments.bytes // 4, device=device)
    for number in range(arguments.rounds + 3):  # the first three warm up
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(arguments.repeat):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        ended.record()
        ended.synchronize()
        seconds = began.elapsed_time(ended) / 1000 / arguments.repeat
        if dist.get_rank() == 0 and number >= 3:
            print(arguments.bytes / seconds * 2 * (ranks - 1) / ranks / 1e9, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
