"""Answer whoever connects, without knowing of phosd: GPT-2 (random weights) reads a prompt of 32
tokens, and the answer is a checksum of what it says of each, as a hexadecimal float.

Prints "listens PORT" first. With the size ``none`` there is no model, and 4 MiB of device memory
are filled instead.

    python answering.py --size none|small|large|xl|3b
"""

import argparse
import socket
from collections.abc import Callable

import small
from cuda.bindings import driver
from gpt2 import SHAPES


def model(size: str) -> Callable[[], float]:
    """Return what answers."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    layers, width, heads = SHAPES[size]
    with torch.device("cuda"):
        made = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads)).eval()
    prompt = torch.arange(32, device="cuda")[None]

    def answer() -> float:
        with torch.no_grad():
            return float(made(prompt).logits.double().sum())

    return answer


def memory() -> Callable[[], float]:
    """Return what answers without a model."""
    small.ok(driver.cuInit(0))
    device = small.ok(driver.cuDeviceGet(0))
    small.ok(driver.cuCtxSetCurrent(small.ok(driver.cuDevicePrimaryCtxRetain(device))))
    size = 4 << 20
    address, last = int(small.ok(driver.cuMemAlloc(size))), bytearray(1)
    small.ok(driver.cuMemsetD8(address, 7, size))

    def answer() -> float:
        small.ok(driver.cuMemcpyDtoH(last, address + size - 1, 1))
        return float(last[0])

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("none", *SHAPES), default="large")
    size = parser.parse_args().size
    answer = memory() if size == "none" else model(size)
    answer()
    with socket.create_server(("127.0.0.1", 0)) as door:
        print("listens", door.getsockname()[1], flush=True)
        while True:
            with door.accept()[0] as caller:
                caller.recv(1 << 10)
                caller.sendall(f"{answer().hex()}\n".encode())


if __name__ == "__main__":
    main()
