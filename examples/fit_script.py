"""A module of one's own, trained as `jaxdist.train` trains: metrics, checkpoints, stops, on any number of processes.

    python -m jaxdist.launch local --processes 2 -- examples/fit_script.py --mesh 4x1x1

The launcher starts it again when one of its processes dies, and it goes on from its newest checkpoint. It also runs
alone: python examples/fit_script.py
"""

import argparse

import jax
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


def rows(count, seed):
    numbers = np.random.default_rng(seed).uniform(size=(count, 8)).astype("float32")
    return {"numbers": numbers, "sorted": np.sort(numbers)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    parser.add_argument("--folder", default="runs/fit_script", help="of the run")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    place = jaxdist.join()  # before anything uses jax
    trainer = jaxdist.parallelize(MLP, loss_fn, optax.adam(1e-2), mesh=options.mesh, zero=1)
    state = jaxdist.fit(
        trainer,
        rows(2000, seed=1),
        batch_size=64,
        steps=options.steps,
        run_dir=options.folder,
        evaluate=rows(500, seed=2),
        log_every=1,
        checkpoint_every=10,
        validation_every=30,
    )
    unseen = rows(4, seed=3)["numbers"]
    guess = trainer.apply(state, lambda model, x: model(x), unseen)
    if place.processes == 1:
        print(f"of a row that is sorted: {np.sort(unseen)[0].round(2)}\nits guess: {jax.device_get(guess)[0].round(2)}")


if __name__ == "__main__":
    main()
