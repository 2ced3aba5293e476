"""Run a process for each of several GPUs, by torchrun or by mp.spawn, over NCCL."""

import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from lines import print_lines

Values = Callable[[int, int], Iterator[float]]
"""What the rank of so many yields for each step; all yield the same number of them."""


def run(values: Values, ranks: int, port: int) -> None:
    """Run the ranks for ever; the first prints a line for each step.

    Under torchrun this process is one of them, and there are as many as torchrun says.
    """
    if "RANK" in os.environ:
        _run(int(os.environ["LOCAL_RANK"]), values, int(os.environ["WORLD_SIZE"]), None)
    else:
        torch.multiprocessing.spawn(_run, (values, ranks, port), nprocs=ranks)


def _run(rank: int, values: Values, ranks: int, port: int | None) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    if port is None:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    if rank == 0:
        print_lines(values(rank, ranks))
    for _ in values(rank, ranks):
        pass
