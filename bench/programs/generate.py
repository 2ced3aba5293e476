"""Generate text with GPT-2 (random weights) repeatedly, without knowing of phosd.

Prints one line per text: number, a checksum of its tokens as a hexadecimal float, seconds, and end
on the monotonic clock.

    python generate.py --size small|large|xl|3b [--batch N] [--tokens N]
"""

import argparse
import time

from gpt2 import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="xl")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    layers, width, heads = SHAPES[arguments.size]
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config)
    model.eval()
    prompt = torch.randint(0, config.vocab_size, (arguments.batch, 64), device="cuda")
    number = 0
    while True:
        start = time.monotonic()
        text = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=arguments.tokens,
            do_sample=False,
            pad_token_id=config.eos_token_id,
        )
        prompt = text[:, -64:].contiguous()
        checksum = float(text.double().mul(torch.arange(text.shape[1], device="cuda")).sum().item())
        end = time.monotonic()
        print(number, checksum.hex(), f"{end - start:.6f} {end:.6f}", flush=True)
        number += 1


if __name__ == "__main__":
    main()
