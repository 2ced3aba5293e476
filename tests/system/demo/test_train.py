"""The demo's program by itself: its kernels compute what the same network in NumPy computes."""

import subprocess
import sys

import numpy as np
from sklearn.datasets import load_digits

from phosd.demo.train import BATCH, FRICTION, HIDDEN, RATE
from tests.support.harness import environment

STEPS = 12


def reference(steps: int) -> list[float]:
    """The losses of the same training in double precision."""
    pictures, labels = load_digits(return_X_y=True)
    pictures = pictures / 16
    random = np.random.default_rng(1)
    shapes = ((pictures.shape[1], HIDDEN), (HIDDEN, 10))
    w1, w2 = (random.normal(0, np.sqrt(2 / n), (n, m)).astype(np.float32) for n, m in shapes)
    weights = [w1.astype(float), np.zeros(HIDDEN), w2.astype(float), np.zeros(10)]
    momenta = [np.zeros_like(w) for w in weights]
    order = random.permutation(len(pictures))
    losses = []
    for step in range(steps):
        rows = order[step * BATCH : (step + 1) * BATCH]
        x, y = pictures[rows], labels[rows]
        hidden = np.maximum(x @ weights[0] + weights[1], 0)
        scores = hidden @ weights[2] + weights[3]
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        losses.append(float(-np.log(shares[np.arange(BATCH), y]).mean()))
        shares[np.arange(BATCH), y] -= 1
        upstream = shares / BATCH
        below = (upstream @ weights[2].T) * (hidden > 0)
        gradients = [x.T @ below, below.sum(axis=0), hidden.T @ upstream, upstream.sum(axis=0)]
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            momentum *= FRICTION
            momentum += gradient
            weight -= RATE * momentum
    return losses


def test_losses_are_those_of_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phosd.demo.train", str(STEPS)],
        env=environment(hooked=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines()]
    assert [int(step) for step, _ in printed] == list(range(STEPS))
    losses = [float(loss) for _, loss in printed]
    # Sums of 64 single-precision products, and approximate exp and log: four digits agree.
    np.testing.assert_allclose(losses, reference(STEPS), rtol=2e-4)
    assert losses[-1] < 0.6 * losses[0], "it learned nothing"
