"""The kernel of ring attention on GPUs with cuDNN: its flash attention on each block (`parallel.context`).

The gradients of a block are those of the softmax over the keys of all devices, so its backward pass gets the output
and the log sum exp that the ring has joined. jax.nn offers neither that pass nor the log sum exp in f32 (it rounds it
to the dtype of the output), so both calls are of a private module of JAX, here and nowhere else.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdist.parallel.context import Attended, Gradients, Keys, Queries


@dataclass(frozen=True)
class CudnnBlocks:
    """FlashAttention-2 (Dao 2023) of cuDNN on each block, which knows neither documents nor a window.

    `models.attention.AttentionCall` says where it runs. Its gradients are of the dtype of queries and keys.
    """

    scale: float
    """Of the scores."""

    def own(self, queries: Queries, keys: Keys) -> Attended:
        """See `Blocks`: a device's two chunks, one after the other, are plainly causal."""
        return self._attend(queries, keys, causal=True)

    def visit(self, queries: Queries, keys: Keys) -> Attended:
        """See `Blocks`."""
        return self._attend(queries, keys, causal=False)

    def own_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"]) -> Gradients:
        """See `Blocks`."""
        return self._gradients(queries, keys, found, g, causal=True)

    def visit_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"]) -> Gradients:
        """See `Blocks`."""
        return self._gradients(queries, keys, found, g, causal=False)

    def _attend(self, queries: Queries, keys: Keys, causal: bool) -> Attended:
        out, sums = _forward(self.scale, queries.q, keys.k, keys.v, causal)
        return Attended(out, sums.swapaxes(1, 2))

    def _gradients(
        self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"], causal: bool
    ) -> Gradients:
        sums = found.sums.swapaxes(1, 2)
        return Gradients(*_backward(self.scale, queries.q, keys.k, keys.v, found.out, sums, g, causal))


def _forward(
    scale: float, q: Float[Array, "B S N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K U"], causal: bool
) -> tuple[Float[Array, "B S N U"], Float[Array, "B N S"]]:
    """Return attention, and the log sum exp of its scores in f32. It has no gradient: cuDNN's ignores the second."""
    cudnn = _module()
    return cudnn.dot_product_attention(q, k, v, scale=scale, mask_type=_mask(cudnn, causal), return_residual=True)


def _backward(
    scale: float,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    out: Float[Array, "B S N U"],
    sums: Float[Array, "B N S"],
    g: Float[Array, "B S N U"],
    causal: bool,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K U"]]:
    """Return the gradients of q, k and v, where the queries have found `out` and `sums` among these keys and others."""
    cudnn = _module()
    settings = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=_mask(cudnn, causal),
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )
    # Newer versions of JAX take a function of the scores.
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters:
        settings["score_mod"] = None
    # A bias, and the lengths, offsets and pages of padded, packed and paged rows.
    unused = [jnp.zeros(0, q.dtype)] * 7
    gradients = cudnn._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *unused, sums, out, g, **settings)
    return tuple(gradients)


def _mask(cudnn: ModuleType, causal: bool) -> object:
    return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK


def _module() -> ModuleType:
    """Return JAX's private module of cuDNN's attention; tests trace it with the oldest and the newest JAX."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
