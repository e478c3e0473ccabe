"""A data set of grain (`pip install grain`): rows with random access, read and changed by threads as they are needed.

    python examples/fit_grain.py --mesh 4x1x1

Their order is a function of the seed and the step. With --by-state the same data set is read by an iterator of grain,
which has its own order: its state is saved with each checkpoint. Kill it at any moment: the same command goes on.
"""

import argparse

import grain
import numpy as np
import optax
from flax import nnx

import jaxdist


class Digits:
    """A source of grain: a length, and items by number. These are blurred pictures of bars, and where the bar is."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        place = rng.integers(8)
        picture = rng.normal(size=(8, 8)).astype("float32")
        picture[place] += 2
        return {"picture": picture, "place": place}


def flipped(row, rng):
    """Augment a row; grain gives each row its own random numbers, the same in each epoch."""
    return row | {"picture": row["picture"][:, :: rng.choice([-1, 1])]}


def loss_fn(model, batch):
    logits = model(batch["picture"].reshape(-1, 64))
    right = (logits.argmax(-1) == batch["place"]).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["place"]).mean(), {"accuracy": right}


def model(rngs):
    return nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 8, rngs=rngs))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    parser.add_argument("--folder", default="runs/fit_grain")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--by-state", action="store_true", help="read by an iterator of grain, in its own order")
    options = parser.parse_args()

    data = grain.MapDataset.source(Digits()).seed(0).random_map(flipped)
    trainer = jaxdist.parallelize(model, loss_fn, optax.adam(1e-2), mesh=options.mesh)
    knobs = {"steps": options.steps, "run_dir": options.folder, "log_every": 10, "checkpoint_every": 10}
    if options.by_state:
        batches = iter(data.shuffle(seed=0).repeat().to_iter_dataset().batch(32))
        jaxdist.fit(trainer, batches, **knobs)
    else:
        jaxdist.fit(trainer, data, batch_size=32, **knobs)


if __name__ == "__main__":
    main()
