"""Causal attention, and which form of it runs: cuDNN's on GPUs that have it, blocks of queries elsewhere.

Query heads are N = G K: each of the K key/value heads serves G of them in a row (grouped-query attention, GQA, Ainslie
et al. 2023). Nothing repeats keys or values.

H is the size of a query and a key, U that of a value: usually the same.

Where the documents of a row are kept apart, `starts` holds for each position where in its row its document starts: the
past begins there. With a sliding window of W tokens (Beltagy et al. 2020, section 3.1; Jiang et al. 2023, section 2) a
query sees itself and the W - 1 tokens before it; 0 means no window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig, RequestError
from jaxdist.config.matmuls import head_sizes_of
from jaxdist.mesh import CONTEXT
from jaxdist.models.blocked_attention import ATTENTION, block_rows, blocked_attention
from jaxdist.models.ring_blocks import QueryBlocks, block_count
from jaxdist.models.ring_blocks_cudnn import CudnnBlocks
from jaxdist.models.scores import Scores, effective_window
from jaxdist.models.sinks import Sinks, with_gradient_of_sinks, with_sinks
from jaxdist.output.units import counted, remedy
from jaxdist.parallel.context import Blocks, Keys, Queries, Ring, Starts, ulysses, with_gradient
from jaxdist.sharding import BATCH, SEQUENCE, Layout

NO_DOCUMENTS = "cuDNN attention, as jax.nn offers it, knows no documents, and model.documents is apart"
"""Why cuDNN attention does not run where documents are kept apart."""

NO_SINKS = "cuDNN attention, as jax.nn offers it, has no sinks, and model.sinks is true"
"""Why cuDNN attention does not run where heads have sinks."""

NO_CAP = "cuDNN attention, as jax.nn offers it, caps no scores, and model.attention_cap is set"
"""Why cuDNN attention does not run where scores have a soft cap."""

ASKED_FOR_BLOCKS = "model.attention is blocks"
"""Why cuDNN attention does not run where another form is asked for."""


@dataclass(frozen=True)
class AttentionCall:
    """What decides which form of attention runs."""

    layout: Layout
    shape: tuple[int, ...]
    """Of the queries, [B, S, N, H]: on the whole mesh, or on a device in a manual region."""
    dtype: DTypeLike
    apart: bool = False
    """Whether documents of a row do not see each other."""
    window: int = 0
    """The window of the scores; 0 where it hides nothing of a row."""
    value_size: int = 0
    """The size of a value; 0 where it is that of a query."""
    capped: bool = False
    """Whether the scores have a soft cap."""
    sinks: bool = False
    """Whether heads have sinks."""
    asked: str = "auto"
    """The form that is asked for: `model.attention`."""

    @classmethod
    def of(cls, model: ModelConfig, window: int, layout: Layout, rows: int, dtype: DTypeLike) -> AttentionCall:
        """Return that of a layer of `model` with this window, for `rows` rows."""
        sizes = head_sizes_of(model)
        shape = (rows, model.sequence, model.heads, sizes.key)
        window = effective_window(window, model.sequence)
        capped = model.attention_cap > 0
        sinks = model.sinks
        return cls(layout, shape, dtype, model.documents_apart, window, sizes.value, capped, sinks, model.attention)

    @property
    def form(self) -> str:
        """Which attention runs, and why."""
        reason = self.why_not_cudnn
        within = " within documents" if self.apart else ""
        if self.window:
            within += f" in a window of {self.window:,} tokens"
        sequence = self.shape[1]
        device = f"{self.layout.platform}, {jnp.dtype(self.dtype).name}, heads of {self.shape[3]}"
        ranks = self.layout.parts(SEQUENCE)
        if self.layout.zigzag:
            ring = f"ring attention over context={ranks}{within}, each half-block"
            if not reason:
                return f"{ring} by cuDNN flash attention: {device}"
            return f"{ring} in {counted(block_count(sequence // ranks // 2), 'block')} of queries, because {reason}"
        exchanged = f"Ulysses over context={ranks}, then " if ranks > 1 else ""
        if not reason:
            return f"{exchanged}cuDNN flash attention{within}: {device}"
        blocks = sequence // block_rows(sequence)
        return f"{exchanged}causal attention{within} in {counted(blocks, 'block')} of queries, because {reason}"

    @property
    def why_not_cudnn(self) -> str:
        """Why cuDNN attention cannot run; empty if it can."""
        return self.beyond_cudnn or cudnn_missing()

    @property
    def by_cudnn(self) -> bool:
        """Whether cuDNN attention runs. Raises `RequestError` where it is asked for, and cannot."""
        reason = self.why_not_cudnn
        if reason and self.asked == "cudnn":
            raise RequestError(f"model.attention is cudnn, but {reason}; {remedy('model.attention to auto or blocks')}")
        return not reason

    @property
    def beyond_cudnn(self) -> str:
        """The same as `why_not_cudnn`, for devices that have cuDNN.

        The limits are those that jax.nn.dot_product_attention checks, and two that it does not: flash attention begins
        with compute capability 8.0, and above 2^31 elements on a device gradients are silently wrong.
        """
        layout = self.layout
        capability = layout.capability
        if self.asked == "blocks":
            return ASKED_FOR_BLOCKS
        if not capability:
            return f"cuDNN attention needs a CUDA device, and the platform here is {layout.platform}"
        if self.unknown_mask:
            return self.unknown_mask
        if capability < (8, 0):
            return f"cuDNN attention needs compute capability 8.0, and this device has {capability[0]}.{capability[1]}"
        name = jnp.dtype(self.dtype).name
        if name not in ("bfloat16", "float16"):
            return f"cuDNN attention takes bfloat16 or float16, not {name}"
        size = self.shape[3]
        largest = 256 if capability >= (9, 0) else 128
        if size % 8 or size > largest:
            return f"cuDNN attention takes heads of a multiple of 8 up to {largest} here, not of {size}"
        if self.value_size not in (0, size):
            return f"cuDNN attention takes values of the size of keys, and here they have {self.value_size} and {size}"
        # In a manual region the shape is of a device's own part already.
        parts = 1 if layout.manual else layout.parts(BATCH) * layout.parts(SEQUENCE) * layout.parts("heads")
        elements = math.prod(self.shape) // parts
        if elements > 2**31:
            return (
                f"cuDNN attention has wrong gradients above 2^31 query elements on a device, and this has {elements:,}"
            )
        return ""

    @property
    def unknown_mask(self) -> str:
        """Which mask, cap or share of the scores cuDNN attention does not know; empty if it knows all."""
        if self.apart:
            return NO_DOCUMENTS
        if self.capped:
            return NO_CAP
        if self.sinks:
            return NO_SINKS
        if self.layout.zigzag and self.window:
            return f"cuDNN attention knows no window of {self.window:,} tokens between the devices of a ring"
        return ""


def causal_attention(
    layout: Layout,
    scores: Scores,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    starts: Starts = None,
    sinks: Sinks = None,
) -> Float[Array, "B S N U"]:
    """Attend to the past (Vaswani et al. 2017, eq. 1), softmax in f32; N and K count the heads of the whole mesh.

    `AttentionCall` says which form runs. Where `context` splits the sequence, keys or heads travel
    (`parallel.context`).
    """
    if not layout.split(SEQUENCE):
        return _on_whole_rows(layout, scores, q, k, v, starts, sinks)
    if layout.manual:
        return _on_parts_of_rows(layout, scores, q, k, v, starts, sinks)
    inner = replace(layout, manual=True)
    own = layout.activation("BSNH")
    # None has no arrays, and so no specs.
    specs = jax.tree.map(layout.activation, (None if starts is None else "BS", None if sinks is None else "BSN"))
    local = partial(_on_parts_of_rows, inner, scores)
    return jax.shard_map(local, in_specs=(own, own, own, *specs), out_specs=own)(q, k, v, starts, sinks)


def _on_parts_of_rows(
    layout: Layout, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts, sinks: Sinks
) -> jax.Array:
    """Attend on a device that holds a part of each row, in a manual region."""

    def saved(a: jax.Array) -> jax.Array:
        return checkpoint_name(a, ATTENTION)

    if not layout.zigzag:

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts) -> jax.Array:
            return _on_whole_rows(layout, scores, q, k, v, starts, _of_own_heads(sinks, q))

        return ulysses(attend, q, k, v, starts, saved)
    ranks = layout.parts(SEQUENCE)
    at = layout.positions(q.shape[1])
    scores = scores.within(ranks * q.shape[1])
    blocks: Blocks = CudnnBlocks(scores.scale)
    if not _call(layout, scores, q, v, starts, sinks).by_cudnn:
        blocks = QueryBlocks(scores)
    ring = Ring(ranks, blocks, unroll=layout.platform == "cpu")
    queries = Queries(q, at, starts)
    keys = Keys(k, v, at)
    # As in `blocked_attention`: remat policies see nothing inside a custom VJP.
    asking, asked, taking = jax.lax.stop_gradient((queries, keys, sinks))
    # Where tokens are is the same in all layers. JAX would make masks of it before the loop over layers, and keep those
    # of all blocks of queries at once: as many values as a half-block has scores.
    found = ring.attend(jax.lax.optimization_barrier(asking), asked)
    found = jax.tree.map(saved, with_sinks(found, taking))
    out = with_gradient(ring, queries, keys, found)
    return out if sinks is None else with_gradient_of_sinks(found._replace(out=out), sinks)


def _of_own_heads(sinks: Sinks, q: Float[Array, "B S N H"]) -> Sinks:
    """Return the sinks of those heads that a device works on in whole rows, its part of all along `context`."""
    if sinks is None:
        return None
    own = q.shape[2]
    first = own * jax.lax.axis_index(CONTEXT)
    # They are alike at all positions.
    return jnp.broadcast_to(jax.lax.dynamic_slice_in_dim(sinks[:, :1], first, own, axis=2), q.shape[:3])


def _on_whole_rows(
    layout: Layout, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts, sinks: Sinks
) -> jax.Array:
    """Attend where each device holds whole rows."""
    scores = scores.within(q.shape[1])
    if not _call(layout, scores, q, v, starts, sinks).by_cudnn:
        return blocked_attention(scores, q, k, v, starts, sinks)
    return _cudnn_attention(layout, scores, q, k, v)


def _call(layout: Layout, scores: Scores, q: jax.Array, v: jax.Array, starts: Starts, sinks: Sinks) -> AttentionCall:
    apart = starts is not None
    capped = scores.cap > 0
    has_sinks = sinks is not None
    return AttentionCall(layout, q.shape, q.dtype, apart, scores.window, v.shape[3], capped, has_sinks, scores.form)


def cudnn_missing() -> str:
    """Return a message if JAX's CUDA plug-in finds no cuDNN, else an empty one; JAX must have made its devices."""
    # The check that jax.nn makes, and raises from.
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    try:
        check_cudnn_version()
    except RuntimeError:
        return "cuDNN is not installed here"
    return ""


def is_cudnn_forward(primitive: Primitive, *_: object, **__: object) -> bool:
    """Keep the results of cuDNN attention: a remat policy, because a name does not reach into its custom VJP."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


def _cudnn_attention(layout: Layout, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Run FlashAttention-2 (Dao 2023) of cuDNN on each device's own rows and heads.

    docs/status.md says where it has run.
    """
    own = layout.activation("BSNH")
    # JAX counts the tokens before the query's own, and after it.
    seen = (scores.window - 1, 0) if scores.window else None
    local = partial(
        jax.nn.dot_product_attention,
        scale=scores.scale,
        is_causal=True,
        local_window_size=seen,
        implementation="cudnn",
    )
    if layout.manual:
        return local(q, k, v)
    return jax.shard_map(local, in_specs=(own, own, own), out_specs=own)(q, k, v)
