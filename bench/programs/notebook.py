"""Train in a Jupyter kernel (ipykernel), cell by cell, as a notebook's client asks for it.

python notebook.py

The client is this process, the kernel its child; they speak ZeroMQ over TCP.
"""

from collections.abc import Iterator
from typing import Any

from jupyter_client.manager import start_new_kernel
from lines import print_lines

_PATIENCE = 300.0
_FIRST = """
import torch
from torch import nn
torch.manual_seed(1)
width = 2048
net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
chance = torch.Generator(device="cuda").manual_seed(2)
seen = []
"""
_STEP = """
given = torch.randn(512, width, device="cuda", generator=chance)
loss = nn.functional.mse_loss(net(given), given.flip(1))
optimizer.zero_grad()
loss.backward()
optimizer.step()
seen.append(loss.item())
"""


def _run(client: Any, cell: str, wanted: str) -> str:
    """Run a cell, and return what an expression is worth after it."""
    reply = client.execute_interactive(
        cell,
        user_expressions={"wanted": wanted},
        output_hook=lambda _: None,
        timeout=_PATIENCE,
    )["content"]
    if reply["status"] != "ok":
        raise RuntimeError("\n".join(reply["traceback"]))
    return str(reply["user_expressions"]["wanted"]["data"]["text/plain"])


def losses() -> Iterator[float]:
    _, client = start_new_kernel(startup_timeout=_PATIENCE)
    _run(client, _FIRST, "width")
    while True:
        yield float(_run(client, _STEP, "seen[-1]"))


if __name__ == "__main__":
    print_lines(losses())
