"""The matmuls of a layer as a GPU computes them: in tiles of the result, one wave of which occupies all cores.

A last wave that is not full takes as long as a full one, and so does a tile at the edge. Small matmuls, as where
tensors are split, therefore take longer than their arithmetic (NVIDIA, Matrix Multiplication Background User's Guide,
DU-09799, sections 2.1 and 3). Splitting the sum (split-K), by which cuBLAS may fill a last wave, is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdist.config import Config, ModelConfig
from jaxdist.config.matmuls import Matmul, matmuls_of
from jaxdist.config.trained import trained_beside
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.expert_rows import rows_of_queue
from jaxdist.planning.hardware import GPUS

Numbers = np.ndarray | float

TILE = (256, 128)
"""Rows and columns of the tile that reaches the highest rate (the same guide, section 2.3)."""


class Product(NamedTuple):
    """The matmuls of rows with a weight of `into` x `out`: one, or as many at once as there are experts."""

    rows: Numbers
    into: Numbers
    out: Numbers
    experts: Numbers = 1


def layer_products(
    m: ModelConfig, tokens: Numbers, ways: Numbers, gpu: str, expert_ways: Numbers = 1
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the FLOPs of one layer's matmuls with weights on one of `ways` devices that split it.

    Its experts are spread over `expert_ways` devices, each of which has as many `tokens`. Idle cores of the last wave
    count as working, and so do rows that pad the queues of experts. The three numbers are those of the forward pass, of
    the gradients of the inputs, and of the gradients of the weights. The router, which is not split, is not among them.
    Frozen weights have no gradients, and what is trained beside them counts as arithmetic alone: its matmuls are thin.
    """
    split = [matmul for matmul in matmuls_of(m).values() if matmul.split]
    products = [_product(m, matmul, tokens, ways, expert_ways) for matmul in split]
    forward = sum(2 * _whole_waves(p.rows, p.out, gpu, p.experts) * p.into for p in products)
    inputs = sum(2 * _whole_waves(p.rows, p.into, gpu, p.experts) * p.out for p in products)
    gradients = sum(2 * _whole_waves(p.into, p.out, gpu, p.experts) * p.rows for p in products)
    if m.frozen:
        beside = 2 * tokens * trained_beside(m) / ways
        return forward + beside, inputs + beside, beside
    return forward, inputs, gradients


def matmul_rate(config: Config, cluster: Cluster) -> float:
    """Return the FLOP/s that matmuls reach on one device.

    It is the peak times `cluster.matmul`, the share of it that large matmuls reach.
    """
    half = 1.0
    if config.precision == "float32" and cluster.gpu != "cpu":
        # The matrix units of a GPU multiply float32 at half the rate of bfloat16.
        half = 0.5
    return half * cluster.peak * cluster.matmul


def _product(m: ModelConfig, matmul: Matmul, tokens: Numbers, ways: Numbers, expert_ways: Numbers) -> Product:
    """Return what one device multiplies of a weight whose columns or rows are split."""
    rows = tokens
    experts: Numbers = 1
    if matmul.stacked:
        rows = rows_of_queue(m, tokens) * expert_ways
        experts = m.experts / expert_ways
    if matmul.is_column:
        return Product(rows, matmul.into, matmul.out / ways, experts)
    return Product(rows, matmul.into / ways, matmul.out, experts)


def _whole_waves(rows: Numbers, columns: Numbers, gpu: str, experts: Numbers = 1) -> Numbers:
    """Return the elements of the results, rows x columns for each expert, rounded up to whole waves.

    They are not rounded where the number of cores is not known.
    """
    if gpu not in GPUS:
        return experts * rows * columns
    cores = GPUS[gpu].cores
    tiles = experts * np.ceil(rows / TILE[0]) * np.ceil(columns / TILE[1])
    return np.ceil(tiles / cores) * cores * TILE[0] * TILE[1]
