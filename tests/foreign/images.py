"""Networks for pictures, as people publish them: U-Net, VAE, ViT, GAN, LoRA by hand, and a frozen batch norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS, CLASSES, NOISE = 16, 8, 4


def pictures(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.normal(size=(ROWS, 8, 8, 1)).astype("f"), "label": rng.integers(0, CLASSES, ROWS)}


def classify(module, batch):
    logits = module(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


class UNet(nnx.Module):
    """Down, up, and a skip; it removes noise."""

    def __init__(self, rngs):
        self.down = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(8, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=4, use_bias=False, rngs=rngs)
        self.out = nnx.Conv(16, 1, (3, 3), rngs=rngs)

    def __call__(self, x):
        a = nnx.silu(self.norm(self.down(x)))
        b = self.up(nnx.silu(self.middle(a)))
        return self.out(jnp.concatenate([a, b], -1))


def denoise(module, batch):
    clean = jnp.tanh(batch["x"])
    return jnp.mean((module(batch["x"]) - clean) ** 2)


class VAE(nnx.Module):
    """Draws its noise from a stream of the module."""

    def __init__(self, rngs):
        self.encoder, self.decoder = nnx.Linear(64, 16, rngs=rngs), nnx.Linear(8, 64, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, x):
        mean, log_var = jnp.split(self.encoder(x.reshape(x.shape[0], -1)), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.decoder(z), mean, log_var


def evidence(module, batch):
    found, mean, log_var = module(batch["x"])
    apart = jnp.mean((found - batch["x"].reshape(found.shape)) ** 2)
    return apart + 0.1 * jnp.mean(mean**2 + jnp.exp(log_var) - 1 - log_var)


class Adapted(nnx.Module):
    """LoRA by hand: A and B beside a frozen matrix, with Flax's annotations."""

    def __init__(self, rngs):
        columns = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))
        rows = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("mlp", None))
        self.base = nnx.Linear(64, 32, kernel_init=columns, rngs=rngs)
        self.lora_a = nnx.Param(rngs.params.normal((64, 4)) / 8)
        self.lora_b = nnx.Param(0.1 * rngs.params.normal((4, 32)), out_sharding=(None, "mlp"))
        self.head = nnx.Linear(32, CLASSES, kernel_init=rows, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        return self.head(jnp.tanh(self.base(x) + x @ self.lora_a @ self.lora_b))


class FrozenNorm(nnx.Module):
    """A backbone whose batch norm is frozen, as detectors have it."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.norm.mean[...] += 0.1
        self.head = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


def adapters(name: str) -> bool:
    """Whether a parameter of `Adapted` is trained."""
    return "lora" in name or name.startswith("head")


class EncoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
        # Without biases: that of the keys has no gradient.
        self.attention = nnx.MultiHeadAttention(2, 16, use_bias=False, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class ViT(nnx.Module):
    """Patches, a class token before them, and learned positions."""

    def __init__(self, rngs):
        self.patches = nnx.Conv(1, 16, (4, 4), strides=(4, 4), padding="VALID", use_bias=False, rngs=rngs)
        self.token = nnx.Param(0.1 * rngs.params.normal((1, 1, 16)))
        self.positions = nnx.Param(0.1 * rngs.params.normal((1, 5, 16)))
        self.layers = nnx.List([EncoderLayer(rngs) for _ in range(2)])
        self.norm, self.head = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(x.shape[0], 4, 16)
        x = jnp.concatenate([jnp.broadcast_to(self.token, (x.shape[0], 1, 16)), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(NOISE, 4 * 4 * 8, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 1, (2, 2), strides=(2, 2), rngs=rngs)

    def __call__(self, z):
        return jnp.tanh(self.up(nnx.relu(self.base(z)).reshape(-1, 4, 4, 8)))


class Discriminator(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), strides=(2, 2), rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 8, 1, rngs=rngs)

    def __call__(self, x):
        h = nnx.leaky_relu(self.conv(x))
        return self.head(h.reshape(x.shape[0], -1))[:, 0]


class GAN(nnx.Module):
    """Two networks, each with a loss of its own."""

    def __init__(self, rngs):
        self.generator, self.discriminator = Generator(rngs), Discriminator(rngs)


def noise_and_pictures(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"z": rng.normal(size=(ROWS, NOISE)).astype("f"), "x": np.tanh(rng.normal(size=(ROWS, 8, 8, 1))).astype("f")}


def of_generator(gan, batch):
    return nnx.softplus(-gan.discriminator(gan.generator(batch["z"]))).mean()


def of_discriminator(gan, batch):
    fake = jax.lax.stop_gradient(gan.generator(batch["z"]))
    return (nnx.softplus(-gan.discriminator(batch["x"])) + nnx.softplus(gan.discriminator(fake))).mean()
