"""The products of a layer, as a GPU computes them: in tiles of the result, a round of which keeps all cores busy.

A last round that is not full takes as long as a full one, and so does a tile at the edge: small products, as where
tensors are split, take longer than their arithmetic (NVIDIA, Matrix Multiplication Background User's Guide, DU-09799,
sections 2.1 and 3). Splitting the sum, by which cuBLAS may fill a last round, is left out.
"""

from __future__ import annotations

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.planning.hardware import GPUS

Numbers = np.ndarray | float

TILE = (256, 128)
"""Rows and columns of the tile that reaches most (the same guide, section 2.3)."""


def layer_products(m: ModelConfig, tokens: Numbers, ways: Numbers, gpu: str) -> tuple[Numbers, Numbers, Numbers]:
    """FLOPs of one layer on one of `ways` devices that split it, cores that wait for the last round counted.

    Of the products with weights forward; backward of the gradients of their inputs, and of the weights.
    """
    wide = (2 if m.family == "llama" else 1) * m.mlp_size / ways
    queries_keys_values = m.embed * (1 + 2 * m.key_value_heads / m.heads) / ways
    weights = [(m.embed, queries_keys_values), (m.embed / ways, m.embed), (m.embed, wide), (m.mlp_size / ways, m.embed)]
    forward = sum(2 * _whole_rounds(tokens, out, gpu) * into for into, out in weights)
    inputs = sum(2 * _whole_rounds(tokens, into, gpu) * out for into, out in weights)
    gradients = sum(2 * _whole_rounds(into, out, gpu) * tokens for into, out in weights)
    return forward, inputs, gradients


def _whole_rounds(rows: Numbers, columns: Numbers, gpu: str) -> Numbers:
    """Elements of a result of rows x columns, as many as its rounds have; as they are where cores are not known."""
    if gpu not in GPUS:
        return rows * columns
    tiles, cores = np.ceil(rows / TILE[0]) * np.ceil(columns / TILE[1]), GPUS[gpu].cores
    return np.ceil(tiles / cores) * cores * TILE[0] * TILE[1]
