"""Learn to balance a pole (DQN) in environments that run in processes of their own.

    python agents.py [--environments N]

The environments are forked after CUDA has begun, and speak with the learner by pipes.
"""

import argparse
import math
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from lines import print_lines
from torch import nn

_KEPT, _BATCH = 1 << 16, 256
State = tuple[float, float, float, float]


class Pole:
    """A pole on a cart, with the equations of Barto, Sutton and Anderson (1983)."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.state = self._begun()

    def step(self, action: int) -> tuple[State, float, bool]:
        """Push left (0) or right (1); return the state, the reward, and whether it fell."""
        place, speed, angle, turning = self.state
        force = 10.0 if action else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        pushed = (force + 0.05 * turning**2 * sine) / 1.1
        turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        driven = pushed - 0.05 * turned * cosine / 1.1
        now = (
            place + 0.02 * speed,
            speed + 0.02 * driven,
            angle + 0.02 * turning,
            turning + 0.02 * turned,
        )
        fell = abs(now[0]) > 2.4 or abs(now[2]) > 0.21
        self.state = self._begun() if fell else now
        return now, 0.0 if fell else 1.0, fell

    def _begun(self) -> State:
        one, two, three, four = (self._chance.uniform(-0.05, 0.05) for _ in range(4))
        return one, two, three, four


def _serve(seed: int, asked: "Connection[tuple[State, State, float, bool], int]") -> None:
    pole = Pole(seed)
    while True:
        before = pole.state
        found, reward, fell = pole.step(asked.recv())
        asked.send((before, found, reward, fell))


def returns(count: int) -> Iterator[float]:
    """Yield the loss of each step plus what the poles have earned in it."""
    torch.manual_seed(1)
    chance = torch.Generator().manual_seed(2)
    model, target = (
        nn.Sequential(
            nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2)
        ).cuda()
        for _ in range(2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    memory = torch.zeros(_KEPT, 11, device="cuda")
    context = multiprocessing.get_context("fork")
    ends = []
    for seed in range(count):
        own, other = context.Pipe()
        context.Process(target=_serve, args=(seed, other), daemon=True).start()
        ends.append(own)
    states = torch.zeros(count, 4)
    filled = 0
    for number in range(1 << 30):
        with torch.no_grad():
            best = model(states.cuda()).argmax(1).cpu()
        explored = torch.rand(count, generator=chance) < max(0.05, 1 - number / 2000)
        actions = torch.where(explored, torch.randint(2, (count,), generator=chance), best)
        for end, action in zip(ends, actions.tolist(), strict=True):
            end.send(action)
        rows = [
            (*before, float(action), *found, reward, float(fell))
            for (before, found, reward, fell), action in zip(
                (end.recv() for end in ends), actions.tolist(), strict=True
            )
        ]
        states = torch.tensor([row[5:9] for row in rows])
        places = (filled + torch.arange(count)) % _KEPT
        memory[places.cuda()] = torch.tensor(rows).cuda()
        filled += count
        drawn = torch.randint(min(filled, _KEPT), (_BATCH,), generator=chance)
        batch = memory[drawn.cuda()]
        with torch.no_grad():
            later = target(batch[:, 5:9]).amax(1)
        wanted = batch[:, 9] + 0.99 * later * (1 - batch[:, 10])
        # A sum over a mask, and no gather: its backward pass adds in any order.
        chosen = nn.functional.one_hot(batch[:, 4].long(), 2)
        loss = nn.functional.smooth_l1_loss((model(batch[:, :4]) * chosen).sum(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 100 == 99:
            target.load_state_dict(model.state_dict())
        yield loss.item() + sum(row[9] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=int, default=16)
    print_lines(returns(parser.parse_args().environments))


if __name__ == "__main__":
    main()
