"""The matmuls of a layer as a GPU computes them: in tiles of the result, one wave of which occupies all cores.

A last wave that is not full takes as long as a full one, and so does a tile at the edge. Small matmuls, as where
tensors are split, therefore take longer than their arithmetic (NVIDIA, Matrix Multiplication Background User's Guide,
DU-09799, sections 2.1 and 3). Splitting the sum (split-K), by which cuBLAS may fill a last wave, is left out.
"""

from __future__ import annotations

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.planning.hardware import GPUS

Numbers = np.ndarray | float

TILE = (256, 128)
"""Rows and columns of the tile that reaches the highest rate (the same guide, section 2.3)."""


def layer_products(m: ModelConfig, tokens: Numbers, ways: Numbers, gpu: str) -> tuple[Numbers, Numbers, Numbers]:
    """Return the FLOPs of one layer's matmuls with weights on one of `ways` devices that split it.

    Idle cores of the last wave count as working. The three numbers are those of the forward pass, of the gradients of
    the inputs, and of the gradients of the weights.
    """
    arrays = 2 if m.traits.gated else 1  # the gate and up projections are computed as one
    up = arrays * m.mlp_size / ways
    query = m.heads * m.head_size / ways
    qkv = query * (1 + 2 * m.key_value_heads / m.heads)
    weights = [(m.embed, qkv), (query, m.embed), (m.embed, up), (m.mlp_size / ways, m.embed)]
    forward = sum(2 * _whole_waves(tokens, out, gpu) * into for into, out in weights)
    inputs = sum(2 * _whole_waves(tokens, into, gpu) * out for into, out in weights)
    gradients = sum(2 * _whole_waves(into, out, gpu) * tokens for into, out in weights)
    return forward, inputs, gradients


def _whole_waves(rows: Numbers, columns: Numbers, gpu: str) -> Numbers:
    """Return the elements of a rows x columns result, rounded up to whole waves.

    They are not rounded where the number of cores is not known.
    """
    if gpu not in GPUS:
        return rows * columns
    cores = GPUS[gpu].cores
    tiles = np.ceil(rows / TILE[0]) * np.ceil(columns / TILE[1])
    return np.ceil(tiles / cores) * cores * TILE[0] * TILE[1]
