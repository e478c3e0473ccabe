"""How much arithmetic a step is, and what share of the devices' peak it reaches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxdist.config import ModelConfig
from jaxdist.mesh import AXES
from jaxdist.planning.hardware import Gpu

FLOPS_FORMULA = "6 x matrix parameters (output table included) + 6 x layers x sequence x embed (causal attention)"


def flops_per_token(model: ModelConfig) -> int:
    """FLOPs to train on one token, forward and backward, recomputation not counted.

    6 for every parameter that multiplies it (PaLM, Chowdhery et al. 2022, appendix B); attention's two products of
    S x D a layer are halved, because a causal model needs one half of them.
    """
    matrices = model.layers * matrices_per_layer(model) + model.vocab * model.embed
    return 6 * matrices + 6 * model.layers * model.sequence * model.embed


def matrices_per_layer(model: ModelConfig) -> int:
    """Parameters of a layer's matrices: query and output, key and value, and the two of the MLP or llama's three."""
    key_value = 2 * model.embed**2 * model.key_value_heads // model.heads
    mlp = (3 if model.family == "llama" else 2) * model.embed * model.mlp_size
    return 2 * model.embed**2 + key_value + mlp


def bandwidth(gpu: Gpu, shape: Mapping[str, int], axes: Collection[str]) -> float:
    """Bytes per second that a GPU sends over these mesh axes: NVLink's where a group lies within a host.

    The devices of a host are neighbours in the mesh, so a group reaches as far as its outermost axis does.
    """
    reach = inside = 1
    for axis in reversed(AXES):
        inside *= shape[axis]
        reach = inside if axis in axes and shape[axis] > 1 else reach
    return gpu.link if reach <= gpu.per_host else gpu.network


def mfu(tokens_per_second: float, flops: int | None, devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation: `flops` a token times tokens a second, over the peak of all devices; None if unknown."""
    return None if peak is None or flops is None else tokens_per_second * flops / (devices * peak)
