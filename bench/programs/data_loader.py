"""Train a ResNet-50 of timm on images that the workers of a DataLoader make.

Prints one line per iteration: number, loss as a hexadecimal float, seconds, and end on the
monotonic clock. The workers begin after CUDA: forked ones inherit what the driver has open and
mapped. Unless ``--persistent``, new ones begin with every epoch, which has 20 iterations.

    python data_loader.py [--start fork|forkserver|spawn] [--workers N] [--persistent] [--batch N]
"""

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch.utils.data import DataLoader

_ITERATIONS = 20
"""Iterations of an epoch."""


class Images:
    """Random images, each the same whenever it is asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        chance = torch.Generator().manual_seed(index)
        return torch.randn(3, 160, 160, generator=chance), index % 1000


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", choices=("fork", "forkserver", "spawn"), default="fork")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    model = timm.create_model("resnet50", pretrained=False).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(
        Images(_ITERATIONS * arguments.batch),
        batch_size=arguments.batch,
        shuffle=True,
        num_workers=arguments.workers,
        persistent_workers=arguments.persistent,
        multiprocessing_context=arguments.start,
        pin_memory=True,
    )
    for iteration, (images, labels) in enumerate(batches(loader)):
        start = time.monotonic()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = model(images.cuda(non_blocking=True))
            loss = torch.nn.functional.cross_entropy(found, labels.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        end = time.monotonic()
        print(iteration, value.hex(), f"{end - start:.6f} {end:.6f}", flush=True)


if __name__ == "__main__":
    main()
