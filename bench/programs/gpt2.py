"""Train GPT-2 on random tokens with PyTorch and transformers, without knowing of phosd.

Prints one line per iteration: number, loss as a hexadecimal float, seconds, and end on the
monotonic clock. The data are a seeded stream, so that two undisturbed runs with ``--deterministic``
print the same losses.

    python gpt2.py --size small|large|xl|3b [--batch N] [--deterministic] [--iterations N]
        [--fill GB]
"""

import argparse
import os
import time

SHAPES = {
    "small": (12, 768, 12),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
    "3b": (40, 2560, 32),
}
"""Layers, width and heads of GPT-2, three of its sizes (Radford et al., 2019) and one of 3.3
billion parameters, 13 GB.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        *("--iterations", "--steps"), type=int, default=0, metavar="N", help="0: until killed"
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--fill", type=int, default=0, help="GB more that each iteration writes")
    arguments = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(arguments.deterministic)
    layers, width, heads = SHAPES[arguments.size]
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.Generator(device="cuda").manual_seed(2)
    shape = (arguments.batch, arguments.length)
    filler = torch.zeros(arguments.fill * 10**9, dtype=torch.uint8, device="cuda")
    iteration = 0
    while not arguments.iterations or iteration < arguments.iterations:
        start = time.monotonic()
        tokens = torch.randint(0, config.vocab_size, shape, generator=data, device="cuda")
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        filler += 1
        value = loss.item()
        end = time.monotonic()
        print(iteration, value.hex(), f"{end - start:.6f} {end:.6f}", flush=True)
        iteration += 1


if __name__ == "__main__":
    main()
