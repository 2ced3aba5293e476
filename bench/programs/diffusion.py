"""Train a U-Net to take noise out of images, as diffusers does, and keep an average of it.

python diffusion.py

Convolutions, group norms, attention at the bottom, the time embedded; bfloat16 by autocast; each
eighth step samples from the averaged model.
"""

import copy
import os
from collections.abc import Iterator

import torch
from lines import print_lines
from torch import nn

_SIDE, _BATCH, _STEPS = 64, 32, 1000


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions with the time between them, and what came in added."""

    def __init__(self, given: int, found: int) -> None:
        super().__init__()
        self._first = nn.Sequential(
            nn.GroupNorm(8, given), nn.SiLU(), nn.Conv2d(given, found, 3, padding=1)
        )
        self._time = nn.Linear(128, found)
        self._second = nn.Sequential(
            nn.GroupNorm(8, found), nn.SiLU(), nn.Conv2d(found, found, 3, padding=1)
        )
        self._past = nn.Conv2d(given, found, 1)

    def forward(self, images: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        found = self._first(images) + self._time(time)[:, :, None, None]
        return torch.as_tensor(self._second(found) + self._past(images))


class UNet(nn.Module):  # type: ignore[misc]
    """Three sizes of images, halved on the way down and doubled on the way up."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self._time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self._enter, self._leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self._down = nn.ModuleList([Block(width, width), Block(width, 2 * width)])
        self._attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self._bottom = Block(2 * width, 2 * width)
        self._up = nn.ModuleList([Block(4 * width, width), Block(2 * width, width)])

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        waves = torch.exp(-torch.arange(32, device=images.device) / 4)
        angles = times[:, None] * waves
        time = self._time(torch.cat([angles.sin(), angles.cos()], dim=1))
        found, kept = self._enter(images), []
        for block in self._down:
            found = block(found, time)
            kept.append(found)
            found = nn.functional.avg_pool2d(found, 2)
        rows = found.flatten(2).transpose(1, 2)
        seen, _ = self._attention(rows, rows, rows, need_weights=False)
        found = self._bottom(found + seen.transpose(1, 2).reshape(found.shape), time)
        for block in self._up:
            found = found.repeat_interleave(2, 2).repeat_interleave(2, 3)
            found = block(torch.cat([found, kept.pop()], dim=1), time)
        return torch.as_tensor(self._leave(found))


@torch.no_grad()  # type: ignore[untyped-decorator]
def _sampled(model: nn.Module, shares: torch.Tensor, images: torch.Tensor) -> float:
    """Take noise out of ``images`` in ten steps (DDIM); return their sum."""
    for at in reversed(range(0, _STEPS, _STEPS // 10)):
        share, before = shares[at], shares[max(at - _STEPS // 10, 0)]
        noise = model(images, torch.full((len(images),), float(at), device="cuda"))
        clean = (images - (1 - share).sqrt() * noise) / share.sqrt()
        images = before.sqrt() * clean.clamp(-3, 3) + (1 - before).sqrt() * noise
    return float(images.double().sum())


def losses() -> Iterator[float]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    model = UNet().cuda()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shares = torch.linspace(0.9999, 0.98, _STEPS, device="cuda").log().cumsum(0).exp()
    chance = torch.Generator(device="cuda").manual_seed(2)
    shape = (_BATCH, 3, _SIDE, _SIDE)
    for number in range(1 << 30):
        images = torch.rand(shape, device="cuda", generator=chance).mul(2).sub(1)
        noise = torch.randn(shape, device="cuda", generator=chance)
        times = torch.randint(_STEPS, (_BATCH,), device="cuda", generator=chance)
        share = shares[times][:, None, None, None]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = model(share.sqrt() * images + (1 - share).sqrt() * noise, times.float())
        loss = nn.functional.mse_loss(found.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.01)
        yield loss.item() + (_sampled(average, shares, noise[:4]) if number % 8 == 7 else 0.0)


if __name__ == "__main__":
    print_lines(losses())
