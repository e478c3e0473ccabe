"""Handwritten digits, a small CNN with batch norm: Flax NNX and optax on one device."""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

ROWS, STEPS = 64, 40


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, padding=1, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv1(x)))
        return self.head(nnx.relu(self.conv2(x)).mean((1, 2)))


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def batches():
    digits, rng = load_digits(), np.random.default_rng(0)
    images = digits.images[..., None].astype("float32") / 16
    for _ in range(STEPS):
        rows = rng.choice(len(images), ROWS, replace=False)
        yield {"image": images[rows], "label": digits.target[rows]}


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


if __name__ == "__main__":
    tx = optax.sgd(0.2, momentum=0.9)
    model = CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for step, batch in enumerate(batches()):
        loss = train_step(model, optimizer, batch)
        print(f"step {step}  loss {loss:.6f}")
