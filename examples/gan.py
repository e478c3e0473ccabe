"""A GAN: two networks, each with a loss and an optimizer of its own, in one module and a loop of one's own.

python examples/gan.py --mesh 4x1x1
"""

import argparse

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist

NOISE, ROWS, STEPS = 4, 256, 800


class MLP(nnx.Module):
    def __init__(self, into, out, rngs):
        self.layers = nnx.List([nnx.Linear(a, 64, rngs=rngs) for a in (into, 64)])
        self.head = nnx.Linear(64, out, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.leaky_relu(layer(x))
        return self.head(x)


class GAN(nnx.Module):
    def __init__(self, rngs):
        self.generator = MLP(NOISE, 2, rngs)
        self.discriminator = MLP(2, 1, rngs)


def generator_loss(gan, batch):
    """Be taken for true."""
    return nnx.softplus(-gan.discriminator(gan.generator(batch["noise"]))).mean()


def discriminator_loss(gan, batch):
    """Tell what is true from what is made."""
    made, true = gan.generator(batch["noise"]), batch["true"]
    return (nnx.softplus(-gan.discriminator(true)) + nnx.softplus(gan.discriminator(made))).mean()


def batch_of(rng):
    """Points on a circle, and the noise that the generator makes points of."""
    angle = rng.uniform(0, 2 * np.pi, ROWS)
    circle = np.stack([np.cos(angle), np.sin(angle)], -1) + rng.normal(0, 0.05, (ROWS, 2))
    return {"true": circle.astype("float32"), "noise": rng.normal(size=(ROWS, NOISE)).astype("float32")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    options = parser.parse_args()

    rules = {"generator": optax.adam(1e-3, b1=0.5), "discriminator": optax.adam(2e-3, b1=0.5)}
    by_network = optax.multi_transform(rules, lambda params: {name: name for name in params})
    trainer = jaxdist.parallelize(GAN, discriminator_loss, by_network, mesh=options.mesh, zero=2)
    state, rng = trainer.init(0), np.random.default_rng(0)
    for step in range(STEPS):
        batch = batch_of(rng)
        d = trainer.gradients(state, batch)
        g = trainer.gradients(state, batch, generator_loss)
        # Each network learns from its own loss.
        grads = {"discriminator": d.grads["discriminator"], "generator": g.grads["generator"]}
        state, _ = trainer.update(state, d._replace(grads=grads))
        if step % 100 == 0:
            print(f"step {step}  discriminator {d.loss:.4f}  generator {g.loss:.4f}")

    made = jax.device_get(trainer.apply(state, lambda gan, z: gan.generator(z), batch_of(rng)["noise"]))
    radius = np.linalg.norm(made, axis=-1)
    print(f"the points that it makes have the radius {radius.mean():.2f}, give or take {radius.std():.2f}")


if __name__ == "__main__":
    main()
