"""Image classifiers: a small convolutional network and the residual networks ResNet-18 and ResNet-50.

They are ordinary `flax.nnx` modules. `module.train()` and `module.eval()` switch dropout, and whether BatchNorm uses
the statistics of the batch or the running ones; in train mode a call updates the `nnx.BatchStat` of the module with
the statistics of all rows of that call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxdist.models.parameters import normal

STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
"""Blocks in each of the four stages (He et al. 2016, "Deep Residual Learning", table 1)."""

LARGE = 64
"""Images of at least this many pixels on their shorter side get the stem of ImageNet."""


class CNN(nnx.Module):
    """Three layers of convolution, BatchNorm and relu, halved twice; for images from 8x8 to 32x32."""

    def __init__(self, classes: int, channels: int, rngs: nnx.Rngs, width: int = 32, dropout: float = 0.0):
        widths = (width, 2 * width, 4 * width)
        inputs = (channels, width, 2 * width)
        self.layers = nnx.List([ConvNorm(a, b, 3, rngs) for a, b in zip(inputs, widths, strict=True)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout else None)
        self.head = head(widths[-1], classes, rngs)

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B classes"]:
        """Return the logits of each image."""
        x = images
        for number, layer in enumerate(self.layers):
            if number > 0:
                x = nnx.max_pool(x, (2, 2), (2, 2), "SAME")
            x = nnx.relu(layer(x))
        return self.head(self.dropout(jnp.mean(x, (1, 2))))


class ResNet(nnx.Module):
    """ResNet-18 or ResNet-50 (He et al. 2016), for images of about `size` pixels on their shorter side.

    A bottleneck has its stride in the 3x3 convolution, as is the custom; the paper has it in the first 1x1. Images
    smaller than 64 pixels get a 3x3 stem that keeps their size, in place of a 7x7 of stride 2 and a pooling of stride
    2. Raises `ValueError` for another depth.
    """

    def __init__(self, depth: int, classes: int, channels: int, rngs: nnx.Rngs, width: int = 64, size: int = 224):
        if depth not in STAGES:
            raise ValueError(f"there is no ResNet of depth {depth} here; use {' or '.join(map(str, STAGES))}")
        block = Basic if depth == 18 else Bottleneck
        self.large = size >= LARGE
        if self.large:
            self.stem = ConvNorm(channels, width, 7, rngs, stride=2)
        else:
            self.stem = ConvNorm(channels, width, 3, rngs)
        blocks = []
        inputs = width
        for stage, count in enumerate(STAGES[depth]):
            for number in range(count):
                # The first block of each stage but the first halves the image.
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(inputs, width * 2**stage, stride, rngs))
                inputs = block.expansion * width * 2**stage
        self.blocks = nnx.List(blocks)
        self.head = head(inputs, classes, rngs)

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B classes"]:
        """Return the logits of each image."""
        x = nnx.relu(self.stem(images))
        if self.large:
            x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, (1, 2)))


class Basic(nnx.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, figure 5, left)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs):
        self.branch = nnx.List(
            [ConvNorm(inputs, width, 3, rngs, stride=stride), ConvNorm(width, width, 3, rngs, scale=0.0)]
        )
        self.shortcut = projection(inputs, width, stride, rngs)

    def __call__(self, x: Float[Array, "B H W inputs"]) -> Float[Array, "B H2 W2 width"]:
        """Return relu(branch(x) + shortcut(x))."""
        return residual(x, self.branch, self.shortcut)


class Bottleneck(nnx.Module):
    """1x1, 3x3 with the stride, and a 1x1 that widens four times (He et al. 2016, figure 5, right)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs):
        outputs = self.expansion * width
        self.branch = nnx.List(
            [
                ConvNorm(inputs, width, 1, rngs),
                ConvNorm(width, width, 3, rngs, stride=stride),
                ConvNorm(width, outputs, 1, rngs, scale=0.0),
            ]
        )
        self.shortcut = projection(inputs, outputs, stride, rngs)

    def __call__(self, x: Float[Array, "B H W inputs"]) -> Float[Array, "B H2 W2 4*width"]:
        """Return relu(branch(x) + shortcut(x))."""
        return residual(x, self.branch, self.shortcut)


class ConvNorm(nnx.Module):
    """A convolution without bias, then BatchNorm, which has one (Ioffe and Szegedy 2015, section 3.2).

    `scale` is the initial scale of the norm: 0 in the last norm of a residual branch makes every block the identity at
    the start (Goyal et al. 2017, section 5.1).
    """

    def __init__(self, inputs: int, outputs: int, size: int, rngs: nnx.Rngs, stride: int = 1, scale: float = 1.0):
        # Symmetric, which "SAME" is not where the stride is 2.
        padding = ((size // 2, size // 2),) * 2
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            (stride, stride),
            padding=padding,
            use_bias=False,
            kernel_init=he_normal,
            rngs=rngs,
        )
        start = nnx.initializers.constant(scale)
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, epsilon=1e-5, scale_init=start, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W inputs"]) -> Float[Array, "B H2 W2 outputs"]:
        """Return the normalised convolution."""
        return self.norm(self.conv(x))


def residual(x: Float[Array, "B H W C"], branch: nnx.List, shortcut: ConvNorm | None) -> Float[Array, "B H2 W2 D"]:
    """Return relu(branch(x) + shortcut(x)), with a relu between the layers of the branch (He et al. 2016, eq. 1, 2)."""
    y = x
    for number, layer in enumerate(branch):
        if number > 0:
            y = nnx.relu(y)
        y = layer(y)
    if shortcut is not None:
        x = shortcut(x)
    return nnx.relu(y + x)


def projection(inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> ConvNorm | None:
    """Make the 1x1 shortcut where the shape changes (option B of He et al. 2016, section 3.3); None: the identity.

    `inputs` and `outputs` are numbers of channels; `stride` is that of the whole block.
    """
    if stride == 1 and inputs == outputs:
        return None
    return ConvNorm(inputs, outputs, 1, rngs, stride=stride)


def head(inputs: int, classes: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Make the classifier; its initial weights have standard deviation 0.01 (Goyal et al. 2017, section 5.1)."""

    def start(key: Array, shape: Sequence[int], dtype: jnp.dtype) -> Array:
        return normal(key, shape, 0.01).astype(dtype)

    return nnx.Linear(inputs, classes, kernel_init=start, rngs=rngs)


def he_normal(key: Key[Array, ""], shape: Sequence[int], dtype: jnp.dtype) -> Float[Array, "size size inputs outputs"]:
    """Draw weights of standard deviation sqrt(2 / fan out) (He et al. 2015, "Delving Deep into Rectifiers", eq. 14).

    They come from `normal`, so that they have the same bits on every machine.
    """
    return normal(key, shape, math.sqrt(2 / (math.prod(shape[:-2]) * shape[-1]))).astype(dtype)
