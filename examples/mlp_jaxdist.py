"""A small MLP learns to sort eight numbers: Flax NNX and optax."""

import numpy as np
import optax
from flax import nnx

import jaxdist

STEPS = 40


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 256, rngs=rngs)
        self.down = nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss_fn(model, batch):
    return optax.l2_loss(model(batch["x"]), batch["sorted"]).mean()


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = rng.normal(size=(64, 8)).astype("float32")
        yield {"x": x, "sorted": np.sort(x)}


trainer = jaxdist.parallelize(MLP, loss_fn, optax.adamw(1e-2), mesh="4x1x1", zero=3)
state = trainer.init(0)
for step, batch in enumerate(batches()):
    state, metrics = trainer.step(state, batch)
    print(f"step {step}  loss {metrics.loss:.6f}")
