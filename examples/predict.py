"""Predict with a sharded module, and measure what you like: `apply` calls any function of the module on the mesh.

python examples/predict.py --mesh 4x1x1
"""

import argparse

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist

ARMS, STEPS = 3, 300


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)])
        self.head = nnx.Linear(64, ARMS, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


def spirals(rng, rows):
    """Points of a spiral with three arms, and which arm each is on."""
    arm, radius = rng.integers(0, ARMS, rows), np.sqrt(rng.uniform(0.01, 1, rows))
    angle = 2 * np.pi * (arm / ARMS + radius) + rng.normal(0, 0.15, rows)
    return {"x": radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1).astype("float32"), "arm": arm}


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["arm"]).mean()


def arm_of(model, x):
    """Predict: a result with a row for each row stays split over the devices."""
    return model(x).argmax(-1)


def confusion(model, batch):
    """Measure: count [true arm, predicted arm]; XLA adds up what the devices count, and each gets the sum."""
    true, found = (nnx.one_hot(a, ARMS) for a in (batch["arm"], arm_of(model, batch["x"])))
    return true.T @ found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    trainer = jaxdist.parallelize(MLP, loss_fn, optax.adam(1e-2), mesh=options.mesh, zero=3)
    state = trainer.init(0)
    for _ in range(STEPS):
        state, metrics = trainer.step(state, spirals(rng, 256))
    print(f"loss {metrics.loss:.4f} after {STEPS} steps")

    counts = jax.device_get(trainer.apply(state, confusion, spirals(rng, 4096)))
    print("true arm, predicted arm:", *counts.astype(int).tolist(), sep="\n  ")
    print(f"accuracy {counts.trace() / counts.sum():.3f}")

    # A map of the plane: any number of rows will do, and `device_get` brings them together.
    y, x = np.mgrid[1:-1:21j, -1:1:42j].astype("float32")
    arms = trainer.apply(state, arm_of, np.stack([x, y], -1).reshape(-1, 2))
    for line in jax.device_get(arms).reshape(x.shape):
        print("".join(".o#"[arm] for arm in line))


if __name__ == "__main__":
    main()
