"""Small re-written versions of architectures that people publish in Flax, each with its loss and its batches.

None has a bias whose gradient is zero by construction, as before a norm: noise would be compared with noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from flax import nnx

import jaxdist
from tests.foreign import decoders, graphs, images, sequences

Kind = Literal["plain", "variables", "special"]
"""What a module asks for: a mean over rows of all its parameters alone; more that it holds, draws or sows; or a loss
that is a sum with a weight, a loss for each of two parts, or parameters that are frozen."""


class Case(NamedTuple):
    make: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable | Mapping[str, Callable]
    """Or the loss of each part of the module."""
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]
    kind: Kind = "plain"
    rules: dict[str, tuple[str, ...]] | None = None
    wrt: Callable[[str], bool] | None = None
    rate: float = 0.3
    """Of plain SGD: one that moves the weights by 1 % in three steps."""
    plain: Callable | None = None
    """The same loss as it is written without jaxdist, where that is another text."""


SPLIT = {"heads": ("model",), "mlp": ("model",), "embed": ()}
GAN_LOSSES = {"discriminator": images.of_discriminator, "generator": images.of_generator}

CASES = {
    "gemma": Case(
        sequences.Gemma, jaxdist.staged, sequences.texts, rules=SPLIT, rate=0.5, plain=sequences.layer_by_layer
    ),
    "ViT": Case(images.ViT, images.classify, images.pictures),
    "U-Net": Case(images.UNet, images.denoise, images.pictures),
    "VAE": Case(images.VAE, images.evidence, images.pictures, "variables"),
    "selective scan": Case(sequences.Selective, sequences.predict, sequences.texts, rate=2.0),
    "encoder and decoder": Case(sequences.Translator, sequences.translate, sequences.texts, rate=2.0),
    "experts that sow": Case(
        sequences.Mixture, sequences.balanced, sequences.texts, "variables", {"mlp": ("model",)}, rate=2.0
    ),
    "LoRA by hand": Case(
        images.Adapted, images.classify, images.pictures, "special", {"mlp": ("model",)}, images.adapters
    ),
    "frozen batch norm": Case(images.FrozenNorm, images.classify, images.pictures, "variables"),
    "GAN": Case(images.GAN, GAN_LOSSES, images.noise_and_pictures, "special"),
    "graph network": Case(graphs.GraphNet, graphs.over_nodes, graphs.graphs, "special"),
    "annotated decoder": Case(
        decoders.Decoder,
        decoders.next_word,
        decoders.sentences,
        rules=SPLIT | {"vocab": ("model",), "kv": ()},
        rate=0.5,
    ),
}
