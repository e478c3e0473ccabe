"""The arithmetic of a step, and the share of the devices' peak that it reaches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxdist.config import ModelConfig
from jaxdist.mesh import AXES
from jaxdist.planning.hardware import Gpu

FLOPS_FORMULA = "6 x matrix parameters (output table included) + 6 x layers x sequence x embed (causal attention)"


def flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs to train on one token, forward and backward, without recomputation.

    They are 6 for every parameter that multiplies the token (PaLM, Chowdhery et al. 2022, appendix B), and attention's
    two matmuls of S x D per layer. These are halved, because a causal model needs one half of them.
    """
    matrices = model.layers * matrices_per_layer(model) + model.vocab * model.embed
    return 6 * matrices + 6 * model.layers * model.sequence * model.embed


def matrices_per_layer(model: ModelConfig) -> int:
    """Return the parameters of a layer's matrices: query and output, key and value, and the two or three of the MLP."""
    key_value = 2 * model.embed**2 * model.key_value_heads // model.heads
    # llama's MLP has a gate.
    arrays = 3 if model.family == "llama" else 2
    mlp = arrays * model.embed * model.mlp_size
    return 2 * model.embed**2 + key_value + mlp


def bandwidth(gpu: Gpu, shape: Mapping[str, int], axes: Collection[str]) -> float:
    """Return the bytes per second that a GPU sends over these mesh axes: NVLink's where a group lies within a host."""
    # The devices of a host are neighbours in the mesh, so a group reaches as far as its outermost axis does.
    reach = 1
    inside = 1
    for axis in reversed(AXES):
        inside *= shape[axis]
        if axis in axes and shape[axis] > 1:
            reach = inside
    return gpu.link if reach <= gpu.per_host else gpu.network


def mfu(tokens_per_second: float, flops: int | None, devices: int, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation, or None where `flops` or `peak` is not known.

    `flops` are those of a token, `peak` those per second of one device.
    """
    if peak is None or flops is None:
        return None
    return tokens_per_second * flops / (devices * peak)
