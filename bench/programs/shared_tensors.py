"""Two processes compute on the same CUDA tensor, which torch.multiprocessing passes between them.

    python shared_tensors.py

A queue carries tensors as legacy CUDA IPC handles, with an event that says when they may be read.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing
from lines import print_lines


def _child(asked: Any, answers: Any) -> None:
    (tensor,) = asked.get()
    while (step := asked.get()) is not None:
        tensor.mul_(1.0001).add_(step * 1e-3)
        answers.put(tensor[step::4096].clone())


def steps() -> Iterator[float]:
    asked: Any = torch.multiprocessing.Queue()
    answers: Any = torch.multiprocessing.Queue()
    tensor = torch.arange(1 << 24, device="cuda", dtype=torch.float32) / (1 << 24)
    child = torch.multiprocessing.Process(target=_child, args=(asked, answers), daemon=True)
    child.start()
    asked.put((tensor,))
    for number in range(1 << 30):
        asked.put(number % 17)
        answer = answers.get()
        value = float(answer.double().sum())
        del answer
        tensor.sub_(1e-4)
        yield value + float(tensor[12345])


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    print_lines(steps())
