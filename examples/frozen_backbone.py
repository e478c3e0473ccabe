"""Transfer: a pretrained backbone stays frozen, a new head learns from noisy labels, and its average (EMA) is used.

python examples/frozen_backbone.py --mesh 4x1x1
"""

import argparse
from functools import partial

import numpy as np
import optax
from flax import nnx

import jaxdist

SIZE, ANGLES, THIRDS = 12, 12, 3


class Net(nnx.Module):
    def __init__(self, rngs, classes):
        up, down = nnx.Linear(SIZE * SIZE, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
        self.backbone = nnx.Sequential(up, nnx.relu, down, nnx.relu)
        self.head = nnx.Linear(64, classes, rngs=rngs)

    def __call__(self, x):
        return self.head(self.backbone(x.reshape(len(x), -1)))


def waves(rng, rows):
    """Pictures of waves in one of twelve directions, each at another phase, under noise."""
    angle, phase = rng.integers(0, ANGLES, rows), rng.uniform(0, 2 * np.pi, (rows, 1, 1))
    y, x = np.mgrid[:SIZE, :SIZE]
    cos, sin = np.cos(np.pi * angle / ANGLES), np.sin(np.pi * angle / ANGLES)
    noise = rng.normal(0, 0.5, (rows, SIZE, SIZE))
    picture = np.sin(np.multiply.outer(cos, x) + np.multiply.outer(sin, y) + phase) + noise
    return {"image": picture.astype("float32"), "label": angle}


def thirds(rng, rows, wrong=0.0):
    """The same pictures with another question: which third of the directions; some answers are wrong."""
    batch = waves(rng, rows)
    third, other = batch["label"] * THIRDS // ANGLES, rng.integers(0, THIRDS, rows)
    return batch | {"label": np.where(rng.random(rows) < wrong, other, third)}


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    mesh, rng = parser.parse_args().mesh, np.random.default_rng(0)

    trainer = jaxdist.parallelize(partial(Net, classes=ANGLES), loss_fn, optax.adam(3e-3), mesh=mesh, zero=3)
    state = trainer.init(0)
    for _ in range(200):
        state, _ = trainer.step(state, waves(rng, 64))
    print(f"pretrained: accuracy {trainer.evaluate(state, waves(rng, 1024))['accuracy']:.3f} of {ANGLES} directions")
    pretrained = {"backbone": nnx.state(trainer.module(state).backbone)}

    # What `wrt` does not choose is frozen: it has no gradient, no optimizer state, and no traffic for either.
    options = dict(mesh=mesh, zero=3, wrt=lambda name: name.startswith("head"), ema=0.98)
    trainer = jaxdist.parallelize(partial(Net, classes=THIRDS), loss_fn, optax.sgd(0.03), **options)
    print(trainer)
    state = trainer.init(1, params=pretrained)  # warns that the head is missing there: it is drawn by the seed
    for _ in range(200):
        state, _ = trainer.step(state, thirds(rng, 32, wrong=0.4))
    test = thirds(rng, 2048)
    print(f"the new head: accuracy {trainer.evaluate(state, test)['accuracy']:.3f}")
    print(f"its average:  accuracy {trainer.evaluate(state, test, ema=True)['accuracy']:.3f}")


if __name__ == "__main__":
    main()
