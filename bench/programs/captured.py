"""Train a perceptron with its whole step in one CUDA graph, without knowing of phosd.

Prints one line per iteration: number, loss as a hexadecimal float, seconds, and end on the
monotonic clock.

    python captured.py [--width N] [--layers N]
"""

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2048)
    arguments = parser.parse_args()

    import torch

    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(arguments.layers):
        layers += [torch.nn.Linear(arguments.width, arguments.width), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, capturable=True)
    data = torch.randn(arguments.batch, arguments.width, device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    number = 0
    while True:
        start = time.monotonic()
        graph.replay()
        value = loss.item()
        end = time.monotonic()
        print(number, value.hex(), f"{end - start:.6f} {end:.6f}", flush=True)
        number += 1


if __name__ == "__main__":
    main()
