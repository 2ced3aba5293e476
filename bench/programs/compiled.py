"""Train a small transformer with ``torch.compile``, whose compiling processes live on beside it.

Prints one line per iteration: number, loss as a hexadecimal float, seconds, and end on the
monotonic clock.

    python compiled.py [--mode default|reduce-overhead|max-autotune]
"""

import argparse
import os
import time

import torch
from torch import nn

_WIDTH, _LENGTH, _BATCH, _LAYERS = 512, 256, 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    modes = ("default", "reduce-overhead", "max-autotune")
    parser.add_argument("--mode", choices=modes, default="default")
    arguments = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    layer = nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, _LAYERS).cuda().to(torch.bfloat16)
    compiled = torch.compile(model, mode=arguments.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.Generator(device="cuda").manual_seed(2)
    shape = (_BATCH, _LENGTH, _WIDTH)
    iteration = 0
    while True:
        start = time.monotonic()
        given = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=data)
        loss = compiled(given).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        end = time.monotonic()
        print(iteration, value.hex(), f"{end - start:.6f} {end:.6f}", flush=True)
        iteration += 1


if __name__ == "__main__":
    main()
