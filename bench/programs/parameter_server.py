"""A worker on one GPU sends gradients to a parameter server on another by PyTorch's RPC.

python parameter_server.py [--port 29512]
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.rpc as rpc
from lines import print_lines
from torch import nn

_WIDTH = 1024


class Server:
    """The parameters, with their optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.weights = nn.Parameter(torch.randn(_WIDTH, _WIDTH, device="cuda:0") / 32)
        self.optimizer = torch.optim.AdamW([self.weights], lr=1e-3)

    def fetch(self) -> torch.Tensor:
        return self.weights.detach()

    def apply(self, gradient: torch.Tensor) -> torch.Tensor:
        self.weights.grad = gradient
        self.optimizer.step()
        return self.weights.detach()


def _steps() -> Iterator[float]:
    server: Any = rpc.remote("server", Server)
    chance = torch.Generator(device="cuda:1").manual_seed(2)
    weights = server.rpc_sync().fetch()
    while True:
        weights = weights.detach().requires_grad_()
        images = torch.randn(256, _WIDTH, device="cuda:1", generator=chance)
        loss = ((images @ weights).tanh() - images.roll(1, 1)).square().mean()
        loss.backward()
        weights = server.rpc_sync().apply(weights.grad)
        yield loss.item()


def _rank(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=300)
    names = ("server", "worker")
    options.set_device_map(names[1 - rank], {rank: 1 - rank})
    rpc.init_rpc(names[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        print_lines(_steps())
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=29512)
    torch.multiprocessing.spawn(_rank, (parser.parse_args().port,), nprocs=2)
