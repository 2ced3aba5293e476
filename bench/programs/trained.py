"""Train a classifier on random images as PyTorch's users do, in one of several ways.

    python trained.py amp|expandable|async|fused|plain|profiled [--resident GB]

``amp``: float16 with a GradScaler. ``expandable``: PyTorch's allocator with expandable segments.
``async``: with the driver's pool (cudaMallocAsync). ``fused``: a fused AdamW. ``profiled``:
torch.profiler (CUPTI) collects two of six steps. Each with ``--resident`` GB of device memory
besides.
"""

import argparse
import os
from collections.abc import Iterator

from lines import print_lines

_ALLOCATORS = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}


def steps(way: str, resident: int) -> Iterator[float]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if way in _ALLOCATORS:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = _ALLOCATORS[way]
    import torch
    from torch import nn

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    kept = [torch.full((1 << 28,), number, device="cuda") for number in range(resident)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(6),
        nn.Flatten(),
        nn.Linear(128 * 64, 100),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=way == "fused")
    scaler = torch.amp.GradScaler("cuda", enabled=way == "amp")
    chance = torch.Generator(device="cuda").manual_seed(2)
    for number in range(1 << 30):
        images = torch.randn(64, 3, 96, 96, device="cuda", generator=chance)
        labels = torch.randint(100, (64,), device="cuda", generator=chance)
        with torch.autocast("cuda", dtype=torch.float16, enabled=way == "amp"):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if kept:
            kept[number % len(kept)] += 1
            yield loss.item() + kept[number % len(kept)][-1].item()
        else:
            yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = ("amp", "expandable", "async", "fused", "plain", "profiled")
    parser.add_argument("way", choices=ways)
    parser.add_argument("--resident", type=int, default=0, metavar="GB")
    arguments = parser.parse_args()
    values = steps(arguments.way, arguments.resident)
    if arguments.way != "profiled":
        print_lines(values)
        return
    from torch.profiler import profile, schedule

    with profile(schedule=schedule(wait=2, warmup=2, active=2)) as profiler:
        print_lines(values, after=lambda _: profiler.step())


if __name__ == "__main__":
    main()
