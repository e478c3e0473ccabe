"""The arithmetic of a step, and the share of the devices' peak that it reaches."""

from __future__ import annotations

from jaxdist.config import ModelConfig

FLOPS_FORMULA = "6 x matrix parameters (output table included) + 6 x layers x sequence x embed (causal attention)"


def flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs to train on one token, forward and backward, without recomputation.

    They are 6 for every parameter that multiplies the token (PaLM, Chowdhery et al. 2022, appendix B), and attention's
    two matmuls of S x D per layer. These are halved, because a causal model needs one half of them.
    """
    matrices = model.layers * matrices_per_layer(model) + model.vocab * model.embed
    return 6 * matrices + 6 * model.layers * model.sequence * model.embed


def matrices_per_layer(model: ModelConfig) -> int:
    """Return the parameters of a layer's matrices: query and output, key and value, and the two or three of the MLP.

    Biases and norms are left out, since no matmul reads them.
    """
    key_value = 2 * model.embed**2 * model.key_value_heads // model.heads
    arrays = 3 if model.traits.gated else 2
    mlp = arrays * model.embed * model.mlp_size
    return 2 * model.embed**2 + key_value + mlp


def mfu(tokens_per_second: float, flops: int | None, devices: int, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation, or None where `flops` or `peak` is not known.

    `flops` are those of a token, `peak` those per second of one device.
    """
    if peak is None or flops is None:
        return None
    return tokens_per_second * flops / (devices * peak)
