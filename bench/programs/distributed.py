"""Train a network on several GPUs with PyTorch, one process for each, over NCCL.

    python distributed.py WAY [--ranks 2] [--resident GB] [--width N]
    torchrun --nproc-per-node 2 distributed.py WAY [...]

``ddp``: DistributedDataParallel. ``fsdp``: fully_shard. ``tensor``: columns and rows of each pair
of layers on different GPUs, as DTensor. ``pipeline``: one stage a GPU, GPipe. ``gloo``: as ``ddp``,
and the losses are summed by gloo on the CPUs. The first rank prints a line for each step.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import nn

_BATCH = 256
_CLASSES = 1000


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _model(width: int) -> nn.Sequential:
    return nn.Sequential(*_blocks(width), nn.Linear(width, _CLASSES).cuda())


def _blocks(width: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [_block(width).cuda() for _ in range(8)]


def _data(width: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator(device="cuda").manual_seed(seed)
    while True:
        images = torch.randn(_BATCH, width, device="cuda", generator=chance)
        yield images, torch.randint(_CLASSES, (_BATCH,), device="cuda", generator=chance)


def _trained(net: Any, model: nn.Module, data: Any, group: Any = None) -> Iterator[float]:
    """Train; yield the sum of the ranks' losses, by ``group`` if there is one."""
    # Tensors and DTensors cannot be changed by the same call.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    for images, labels in data:
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().cpu() if group else loss.detach().clone()
        dist.all_reduce(total, group=group)
        yield float(total)


def _replicated(width: int, rank: int, group: Any = None) -> Iterator[float]:
    model = _model(width)
    net = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    return _trained(net, model, _data(width, rank), group)


def _sharded(width: int, rank: int) -> Iterator[float]:
    from torch.distributed.fsdp import fully_shard

    model = _model(width)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return _trained(model, model, _data(width, rank))


def _split(width: int, ranks: int) -> Iterator[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (ranks,))
    model = _model(width)
    for block in model[:-1]:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _trained(model, model, _data(width, 0))


def _staged(width: int, rank: int, ranks: int) -> Iterator[float]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    blocks = _blocks(width)
    own = blocks[rank * len(blocks) // ranks : (rank + 1) * len(blocks) // ranks]
    last = rank == ranks - 1
    module = nn.Sequential(*own, *([nn.Linear(width, _CLASSES).cuda()] if last else []))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    stage = PipelineStage(module, rank, ranks, torch.device("cuda", rank))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.cross_entropy)
    for images, labels in _data(width, 0):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([images] if rank == 0 else []),
            **({"target": labels, "losses": losses} if last else {}),
        )
        optimizer.step()
        total = torch.stack(losses).mean().detach() if last else torch.zeros((), device="cuda")
        dist.broadcast(total, ranks - 1)
        yield total.item()


def _values(arguments: argparse.Namespace, rank: int, ranks: int) -> Iterator[float]:
    kept = [torch.full((1 << 28,), number, device="cuda") for number in range(arguments.resident)]
    width = arguments.width
    values = {
        "ddp": lambda: _replicated(width, rank),
        "fsdp": lambda: _sharded(width, rank),
        "tensor": lambda: _split(width, ranks),
        "pipeline": lambda: _staged(width, rank, ranks),
        "gloo": lambda: _replicated(width, rank, dist.new_group(backend="gloo")),
    }[arguments.way]()
    return _with(kept, values)


def _with(kept: list[torch.Tensor], values: Iterator[float]) -> Iterator[float]:
    """Change some of the resident memory at each step, and add what it holds."""
    for number, value in enumerate(values):
        if not kept:
            yield value
            continue
        one = kept[number % len(kept)]
        one[: 1 << 20] += 1
        yield value + one[number % (1 << 20)].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("ddp", "fsdp", "tensor", "pipeline", "gloo"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--resident", type=int, default=0, metavar="GB", help="for each rank")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--port", type=int, default=29511)
    arguments = parser.parse_args()
    ranks.run(partial(_values, arguments), arguments.ranks, arguments.port)


if __name__ == "__main__":
    main()
