"""A script of one's own on several processes: it saves as it goes, stops when it is asked to, and goes on from there.

    python -m jaxdist.launch local --processes 2 -- examples/own_script.py --mesh 4x1x1

The launcher starts it again when one of its processes dies. It also runs alone: python examples/own_script.py
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import optax
from flax import nnx

import jaxdist


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 64, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss_fn(model, batch):
    return ((model(batch["numbers"]) - batch["sorted"]) ** 2).mean()


def batch_of(step):
    """A function of the step alone, so that a run that goes on sees what it would have seen."""
    numbers = np.random.default_rng(step).uniform(size=(64, 8)).astype("float32")
    return {"numbers": numbers, "sorted": np.sort(numbers)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    parser.add_argument("--folder", type=Path, default="runs/own_script", help="where launchers look for checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    options = parser.parse_args()

    place = jaxdist.join()  # before anything uses jax
    trainer = jaxdist.parallelize(MLP, loss_fn, optax.adam(1e-2), mesh=options.mesh, zero=1)
    saved = any(options.folder.glob("checkpoints/sums/*.json"))
    state = trainer.restore(options.folder) if saved else trainer.init(0)
    for step in range(int(state.step), options.steps):
        if place.should_stop():  # the time is nearly over, or somebody has pressed Ctrl-C
            trainer.save(options.folder, state)
            sys.exit(jaxdist.STOPPED)
        state, metrics = trainer.step(state, batch_of(step))
        if place.leader:
            print(f"step {step}  loss {metrics.loss:.6f}", flush=True)
        if (step + 1) % options.every == 0:
            trainer.save(options.folder, state)


if __name__ == "__main__":
    main()
