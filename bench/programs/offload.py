"""Train with parameters and Adam's moments in pinned host memory, as ZeRO-Offload does.

    python offload.py [--layers N] [--width N] [--threads N]

The GPU has weights in bfloat16. Gradients leave it on one stream while others are computed, the
processors update what they have in float32, and the weights come back on another stream. Threads,
each bound to a processor, look at the moments, and end the program if they find themselves on
another one.
"""

import argparse
import os
import threading
import time
from collections.abc import Iterator

import torch
from lines import print_lines
from torch import nn


class Offloaded:
    """A layer's weights on the GPU, and the rest of its state in pinned memory."""

    def __init__(self, layer: nn.Linear, outwards: torch.cuda.Stream) -> None:
        self._weights = layer.weight
        self._outwards, self._gone = outwards, torch.cuda.Event()
        shape = layer.weight.shape
        self.parameters, self.mean, self.square = (
            torch.zeros(shape, pin_memory=True) for _ in range(3)
        )
        self._gradients, self._back = (
            torch.zeros(shape, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)
        )
        self.parameters.copy_(layer.weight.detach())
        layer.weight.register_post_accumulate_grad_hook(self._send)

    def _send(self, weights: torch.Tensor) -> None:
        assert weights.grad is not None
        self._outwards.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outwards):
            self._gradients.copy_(weights.grad, non_blocking=True)
            weights.grad.record_stream(self._outwards)
            self._gone.record()
        weights.grad = None

    def update(self, number: int, inwards: torch.cuda.Stream) -> None:
        """Make step ``number`` (from 1) of Adam on the host, and send the weights back."""
        self._gone.synchronize()
        gradients = self._gradients.float()
        self.mean.lerp_(gradients, 0.1)
        self.square.lerp_(gradients.square(), 0.001)
        spread = (self.square / (1 - 0.999**number)).sqrt_().add_(1e-8)
        self.parameters.addcdiv_(self.mean, spread, value=-1e-4 / (1 - 0.9**number))
        self._back.copy_(self.parameters)
        with torch.cuda.stream(inwards):
            self._weights.data.copy_(self._back, non_blocking=True)


def _watch(moments: torch.Tensor, processor: int) -> None:
    os.sched_setaffinity(0, {processor})
    for at in range(1 << 62):
        moments[at % len(moments)].sum()
        if os.sched_getaffinity(0) != {processor}:
            print(f"a thread has lost processor {processor}", flush=True)
            os._exit(3)
        time.sleep(0.002)


def losses(width: int, depth: int, threads: int) -> Iterator[float]:
    torch.manual_seed(1)
    layers = [
        nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16)
        for _ in range(depth)
    ]
    outwards, inwards = torch.cuda.Stream(), torch.cuda.Stream()
    offloaded = [Offloaded(layer, outwards) for layer in layers]
    processors = sorted(os.sched_getaffinity(0))
    for number in range(threads):
        words = (offloaded[number % depth].mean, processors[number % len(processors)])
        threading.Thread(target=_watch, args=words, daemon=True).start()
    chance = torch.Generator(device="cuda").manual_seed(2)
    for number in range(1, 1 << 30):
        given = torch.randn(256, width, device="cuda", dtype=torch.bfloat16, generator=chance)
        found = given
        for layer in layers:
            found = found + 0.3 * nn.functional.gelu(layer(found))
        loss = (found - given.roll(1, 0)).float().square().mean()
        loss.backward()
        for each in reversed(offloaded):
            each.update(number, inwards)
        torch.cuda.current_stream().wait_stream(inwards)
        inwards.synchronize()
        yield loss.item() + float(offloaded[number % depth].parameters[number % width].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    print_lines(losses(arguments.width, arguments.layers, arguments.threads))


if __name__ == "__main__":
    main()
