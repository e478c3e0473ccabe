"""The FSDP walk-through: two layers of 4x4 on four devices, 12 rows, and nothing that is whole between two steps.

python examples/course/fsdp.py --mesh 4x1x1

The usual original sums the gradients by an all-reduce and then keeps a shard; what belongs to an all-gather is a
reduce-scatter, which sends half as much. `python -m jaxdist.lab fsdp-walkthrough` takes the step apart.
"""

import argparse
from collections import Counter

import numpy as np
import optax
from flax import nnx

import jaxdist


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["t"]) ** 2).mean()


def collectives(trainer, batch):
    """The collectives of a step on arrays, read from the compiled program: kind -> calls, and elements sent."""
    calls, sent = Counter(), 0.0
    for one in trainer.collectives(batch):
        if one.array_elements:
            calls[one.kind] += one.count
            sent += one.wire
    return ", ".join(f"{count} {kind}" for kind, count in sorted(calls.items())), sent


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    mesh, rng = parser.parse_args().mesh, np.random.default_rng(0)
    batch = {name: rng.normal(size=(12, 4)).astype("float32") for name in ("x", "t")}
    # The largest mesh first: a process makes its CPU devices once.
    for name, on, zero in (("FSDP", mesh, 3), ("DDP", mesh, 0), ("one device", "1x1x1", 0)):
        trainer = jaxdist.parallelize(TwoLayers, loss_fn, optax.sgd(0.5), mesh=on, zero=zero, scope="rows")
        state = trainer.init(0)
        kernel = state.params["first"]["kernel"]
        calls, sent = collectives(trainer, batch)
        for _ in range(5):
            state, metrics = trainer.step(state, batch)
        shard = "x".join(map(str, kernel.sharding.shard_shape(kernel.shape)))
        held = f"a device holds {shard} of each weight"
        print(f"{name:<11} loss {float(metrics.loss):.6f}  {held}  sends {sent:g}: {calls}")


if __name__ == "__main__":
    main()
