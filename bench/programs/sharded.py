"""Train a network with JAX on all GPUs from one process: shard_map, with sums between them.

python sharded.py [--share 0.1]
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

from lines import print_lines


def losses() -> Iterator[float]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    count = len(jax.devices())
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    over = PartitionSpec("batch")
    key = jax.random.key(1)
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(jax.random.normal(key, (4, 1024, 1024)) / 32, whole)

    def loss_of(weights: Any, images: Any) -> Any:
        found = images
        for layer in weights:
            found = jnp.tanh(found @ layer)
        return jnp.mean((found - jnp.roll(images, 1, axis=1)) ** 2)

    def train(weights: Any, images: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, images)
        gradients = jax.lax.psum(gradients, "batch") / count
        return weights - 0.1 * gradients, jax.lax.psum(loss, "batch") / count

    everywhere = PartitionSpec()
    step = jax.jit(
        jax.shard_map(
            train,
            mesh=mesh,
            in_specs=(everywhere, over),
            out_specs=(everywhere, everywhere),
            check_vma=False,
        )
    )
    while True:
        key, now = jax.random.split(key)
        images = jax.device_put(
            jax.random.normal(now, (512 * count, 1024)), NamedSharding(mesh, over)
        )
        weights, loss = step(weights, images)
        yield float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.1, help="of each GPU's memory, for XLA")
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(parser.parse_args().share)
    os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true"
    print_lines(losses())
