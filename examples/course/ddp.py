"""A data-parallel training script: a new order in each epoch, every row once, and the loss of all rows.

python examples/course/ddp.py --mesh 4x1x1

The usual original keeps one order for all epochs (`set_epoch` is forgotten), fills the last batch up with rows that
have been read, and prints the loss of the rows of one rank.
"""

import argparse

import numpy as np
import optax
from flax import nnx

import jaxdist

ROWS, BATCH, EPOCHS = 1001, 64, 3  # the last batch of an epoch has 41 rows, which no mesh divides


def model(rngs):
    return nnx.Linear(20, 1, rngs=rngs)


def loss_fn(model, batch):
    """The sum over the rows that are real, and their number: jaxdist divides once, over all devices."""
    errors = ((model(batch["x"]) - batch["t"]) ** 2)[:, 0] * batch["real"]
    return {"loss": (errors.sum(), batch["real"].sum())}


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 20)).astype("float32")
    noise = 0.1 * rng.normal(size=(ROWS, 1)).astype("float32")
    return x, x @ np.linspace(-1, 1, 20, dtype="float32")[:, None] + noise


def batches(epoch):
    """The rows of each batch, and which of them are real: padding counts for nothing."""
    order = np.random.default_rng((0, epoch)).permutation(ROWS)
    for first in range(0, ROWS, BATCH):
        rows = order[first : first + BATCH]
        yield np.resize(rows, BATCH), (np.arange(BATCH) < len(rows)).astype("float32")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    trainer = jaxdist.parallelize(model, loss_fn, optax.sgd(0.02), mesh=parser.parse_args().mesh)
    state, (x, t), orders = trainer.init(0), data(), set()
    for epoch in range(EPOCHS):
        read, summed = [], 0.0
        for rows, real in batches(epoch):
            state, metrics = trainer.step(state, {"x": x[rows], "t": t[rows], "real": real})
            read.extend(rows[real > 0])
            summed += float(metrics.loss) * real.sum()
        orders.add(tuple(read))
        print(f"epoch {epoch}  loss {summed / ROWS:.6f}  {len(read)} rows read, {len({*read})} of them once")
    print(f"{len(orders)} orders in {EPOCHS} epochs")

    def loss_of(rows):
        return trainer.evaluate(state, {"x": x[rows], "t": t[rows], "real": np.ones(len(rows), "float32")})["loss"]

    # What the ranks would print: each the loss of its own rows.
    of_each = [loss_of(own) for own in np.split(np.array(read[:BATCH]), trainer.mesh.size)]
    print(
        f"loss of {BATCH} rows {loss_of(read[:BATCH]):.6f}; of each rank's {' '.join(f'{one:.6f}' for one in of_each)}"
    )


if __name__ == "__main__":
    main()
