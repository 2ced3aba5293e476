"""Train, and save model and optimizer by torch.distributed.checkpoint.async_save every 20 steps.

python async_saved.py

A thread writes what was copied to the host while the next steps are computed, to two folders in
turn, among the temporary files.
"""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from lines import print_lines
from torch import nn

_WIDTH, _EVERY = 2048, 20


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))


def losses() -> Iterator[float]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    model = nn.Sequential(*(_block() for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    chance = torch.Generator(device="cuda").manual_seed(2)
    folder = Path(tempfile.gettempdir(), f"phos-async-{os.getpid()}")
    saving: Future[object] | None = None
    for number in range(1, 1 << 30):
        given = torch.randn(256, _WIDTH, device="cuda", generator=chance)
        loss = nn.functional.mse_loss(model(given), given.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % _EVERY == 0:
            if saving is not None:
                saving.result()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            where = folder / str(number // _EVERY % 2)
            saving = torch.distributed.checkpoint.async_save(state, checkpoint_id=where)
        yield loss.item()


if __name__ == "__main__":
    print_lines(losses())
