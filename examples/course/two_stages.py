"""Layers on two devices: the same step with one batch, where a device always waits, and with micro-batches.

python examples/course/two_stages.py --mesh 1x1x2

The usual original moves the activation by hand (`.to("cuda:1")`) and sends the whole batch through at once, so that
each device works half of the time. `python -m jaxdist.lab model-parallel` takes that step apart.
"""

import argparse

import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.lab.schedules import TIMES
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.simulate import bubble

LAYERS, WIDTH, ROWS = 4, 16, 32


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.linear(x))


class Deep(nnx.Module):
    """A module that can be cut at each of its layers: `embed`, `blocks`, `head`."""

    def __init__(self, rngs):
        self.enter = nnx.Linear(20, WIDTH, rngs=rngs)
        self.blocks = jaxdist.stack(Block, LAYERS, rngs)
        self.leave = nnx.Linear(WIDTH, 1, rngs=rngs)

    def embed(self, batch):
        return self.enter(batch["x"])

    def head(self, x, batch):
        return ((self.leave(x) - batch["t"]) ** 2).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="1x1x2")
    mesh, rng = parser.parse_args().mesh, np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, 20)).astype("float32"), "t": rng.normal(size=(ROWS, 1)).astype("float32")}
    # The largest mesh first: a process makes its CPU devices once.
    for on, parts in ((mesh, 8), (mesh, 1), ("1x1x1", 1)):
        schedule = {} if on == "1x1x1" else {"schedule": "gpipe"}
        trainer = jaxdist.parallelize(
            Deep, jaxdist.staged, optax.sgd(0.01), mesh=on, accumulation=parts, scope="rows", **schedule
        )
        state = trainer.init(0)
        for _ in range(5):
            state, metrics = trainer.step(state, batch)
        stages = trainer.mesh.shape["pipeline"]
        idle = bubble(make("gpipe", stages, parts), TIMES).share
        print(f"mesh {on}, micro-batches {parts}: loss {float(metrics.loss):.6f}, a device waits {idle} of the time")


if __name__ == "__main__":
    main()
