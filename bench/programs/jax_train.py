"""Train a network on random data with JAX, flax and optax, without knowing of phosd.

XLA takes a share of the GPU's memory at its first use, and its threads ask the driver again and
again whether work is done. Prints one line per iteration: number, loss as a hexadecimal float,
seconds, and end on the monotonic clock. Two undisturbed runs print the same losses.

    python jax_train.py [--share 0.3] [--width N] [--depth N] [--iterations N] [--save-every N]

With ``--save-every`` orbax saves the parameters each so many iterations, while the next ones are
computed, in a folder of this process among the temporary files; it keeps the last two.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory, for XLA")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=0, help="0: until killed")
    parser.add_argument("--save-every", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(arguments.share)
    os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true"

    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen

    layers = [linen.Dense(arguments.width)]
    for _ in range(arguments.depth):
        layers += [linen.LayerNorm(), linen.gelu, linen.Dense(arguments.width)]
    network, optimizer = linen.Sequential([*layers, linen.Dense(10)]), optax.adamw(1e-3)
    key = jax.random.key(1)
    parameters = network.init(key, jnp.zeros((1, 784)))
    state = optimizer.init(parameters)

    def train(parameters: Any, state: Any, key: Any) -> tuple[Any, Any, Any]:
        images = jax.random.normal(key, (1024, 784))
        labels = jnp.argmax(images[:, :10], axis=1)

        def loss_of(parameters: Any) -> Any:
            found = network.apply(parameters, images)
            return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    compiled = jax.jit(train)
    save = _saver() if arguments.save_every else None
    iteration = 0
    while not arguments.iterations or iteration < arguments.iterations:
        start = time.monotonic()
        key, now = jax.random.split(key)
        parameters, state, loss = compiled(parameters, state, now)
        value = float(loss)
        end = time.monotonic()
        print(iteration, value.hex(), f"{end - start:.6f} {end:.6f}", flush=True)
        iteration += 1
        if save is not None and iteration % arguments.save_every == 0:
            save(iteration, parameters)


def _saver() -> Callable[[int, Any], None]:
    """Return a function that has orbax save parameters in the background."""
    from orbax import checkpoint

    options = checkpoint.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    folder = Path(tempfile.gettempdir(), f"phos-orbax-{os.getpid()}")
    manager = checkpoint.CheckpointManager(folder, options=options)

    def save(iteration: int, parameters: Any) -> None:
        manager.save(iteration, args=checkpoint.args.StandardSave(parameters))

    return save


if __name__ == "__main__":
    main()
