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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxdist.config import ModelConfig, RequestError
from jaxdist.config.matmuls import head_sizes_of
from jaxdist.mesh import CONTEXT
from jaxdist.models.ring_blocks import QueryBlocks, block_count
from jaxdist.models.ring_blocks_cudnn import CudnnBlocks
from jaxdist.models.scores import Scores, effective_window
from jaxdist.models.sinks import Sinks, with_gradient_of_sinks, with_sinks
from jaxdist.output.units import counted, remedy
from jaxdist.parallel.context import Attended, Blocks, Keys, Queries, Ring, Starts, ulysses, with_gradient
from jaxdist.sharding import BATCH, SEQUENCE, Layout, wide

ATTENTION = "attention"
"""The checkpoint name of attention's results, for activation checkpointing (remat) policies."""

BLOCK = 128
"""Fewest queries that blocked attention works on at a time."""

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
    # As in `_blocked_attention`: remat policies see nothing inside a custom VJP.
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
        return _blocked_attention(scores, q, k, v, starts, sinks)
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


def _blocked_attention(
    scores: Scores,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    starts: Starts,
    sinks: Sinks,
) -> Float[Array, "B S N U"]:
    """Attend in blocks of queries that skip the keys after them, and those that a window hides from all of them.

    With n blocks the work is (n + 1) / 2n of the full square (Dao 2023, section 3.1.1), and with a window that of S
    rows of at most S / n + W keys. No S x S array is kept: the backward pass recomputes each block's probabilities from
    the log sum exp of its rows (section 3.1). The blocks are unrolled, at most 8, so that the program does not grow
    with S.
    """
    # Remat policies see nothing inside a custom VJP: so the results are made and named before it.
    results = _blocked_forward(scores, *jax.lax.stop_gradient((q, k, v)), starts)
    if sinks is None:
        out, sums = (checkpoint_name(a, ATTENTION) for a in results)
        return _with_gradient(scores, q, k, v, starts, out, sums)
    group = q.shape[2] // k.shape[2]
    out, sums = results
    found = with_sinks(Attended(out, _ungroup(sums, group)[..., 0]), jax.lax.stop_gradient(sinks))
    found = jax.tree.map(partial(checkpoint_name, name=ATTENTION), found)
    out = _with_gradient(scores, q, k, v, starts, found.out, _group(found.sums[..., None], group))
    return with_gradient_of_sinks(found._replace(out=out), sinks)


def _blocked_forward(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts
) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, S, N, U], laid out as its matmul with a weight keeps it, and log sum exp [B, K, S', 1].

    S' is G S: see `_group`. The keys' S is called T.
    """
    group = q.shape[2] // k.shape[2]
    sequence = q.shape[1]
    q = _group(q, group)
    k = k.swapaxes(1, 2)
    v = v.swapaxes(1, 2)
    blocks = []
    sums = []
    for block in _blocks(sequence, group, scores.window):
        s = _scores(scores, q[:, :, block.rows], k[:, :, block.past], block, group, starts)
        # The maximum is subtracted so that exp does not overflow (Dao et al. 2022, section 3.1).
        highest = jnp.max(s, -1, keepdims=True)
        p = jnp.exp(s - highest)
        total = jnp.sum(p, -1, keepdims=True)
        out = jnp.einsum("BKST,BKTH->BKSH", p.astype(v.dtype), v[:, :, block.past], preferred_element_type=total.dtype)
        blocks.append((out / total).astype(v.dtype))
        sums.append(highest + jnp.log(total))
    return _ungroup(jnp.concatenate(blocks, axis=2), group), jnp.concatenate(sums, axis=2)


Saved = tuple[jax.Array, jax.Array, jax.Array, Starts, jax.Array, jax.Array]
"""(q, k, v, starts, out, sums) of `_with_gradient`."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts, out: jax.Array, sums: jax.Array
) -> jax.Array:
    """Return `out`, whose gradient goes to q, k and v."""
    return out


def _with_gradient_forward(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts, out: jax.Array, sums: jax.Array
) -> tuple[jax.Array, Saved]:
    return out, (q, k, v, starts, out, sums)


def _with_gradient_backward(
    scores: Scores, saved: Saved, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, None]:
    """Return the gradients of q, k and v (Dao et al. 2022, appendix B.2)."""
    q, k, v, starts, out, sums = saved
    group = q.shape[2] // k.shape[2]
    sequence = q.shape[1]
    correction = _group(jnp.sum((g * out).astype(sums.dtype), -1, keepdims=True), group)
    q = _group(q, group)
    g = _group(g, group)
    k = k.swapaxes(1, 2)
    v = v.swapaxes(1, 2)
    # dK and dV are formed transposed, so that P and dS, the large ones, are not. Q and dO are transposed behind a
    # barrier for the CPU's sake: see `parallel.matmul_cpu`.
    q_columns, g_columns = jax.lax.optimization_barrier((q.swapaxes(2, 3), g.swapaxes(2, 3)))

    def transposed(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("BKHS,BKST->BKHT", a, b).astype(sums.dtype)

    dq = []
    # The blocks' shares of dK and dV are accumulated in f32.
    dk: jax.Array | int = 0
    dv: jax.Array | int = 0
    for block in _blocks(sequence, group, scores.window):
        rows = block.rows
        past = block.past
        around = [(0, 0), (0, 0), (0, 0), (past.start, sequence - past.stop)]
        s = _scores(scores, q[:, :, rows], k[:, :, past], block, group, starts)
        p = jnp.exp(s - sums[:, :, rows])
        dp = jnp.einsum("BKSH,BKTH->BKST", g[:, :, rows], v[:, :, past], preferred_element_type=p.dtype)
        # dS = P * (dP - rowsum(dO * O)), times the scale of the scores, and the slope of their cap.
        ds = (p * (dp - correction[:, :, rows]) * scores.slope(s)).astype(q.dtype)
        dq.append(jnp.einsum("BKST,BKTH->BKSH", ds, k[:, :, past]))
        dk += jnp.pad(transposed(q_columns[..., rows], ds), around)
        dv += jnp.pad(transposed(g_columns[..., rows], p.astype(g.dtype)), around)
    dk, dv = (jnp.moveaxis(d, 3, 1).astype(k.dtype) for d in (dk, dv))
    return _ungroup(jnp.concatenate(dq, axis=2), group), dk, dv, None, None, None


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


class _Block(NamedTuple):
    """A block of queries, and the keys that some of them see."""

    rows: slice
    """The queries, as `_group` lays them out."""
    queries: slice
    """Their positions."""
    past: slice
    """The positions of the keys."""


def _scores(
    scores: Scores,
    q: Float[Array, "B K S' H"],
    k: Float[Array, "B K T H"],
    block: _Block,
    group: int,
    starts: Starts,
) -> Float[Array, "B K S' T"]:
    """Return the scores of a block's queries with its keys, -inf where a key is not visible."""
    products = jnp.einsum("BKSH,BKTH->BKST", q * scores.scale, k, preferred_element_type=wide(q.dtype))
    return jnp.where(_visible(scores, block, group, starts), scores.capped(products), -jnp.inf)


def _visible(scores: Scores, block: _Block, group: int, starts: Starts) -> Bool[Array, "... S' T"]:
    """Return which keys each query of a block sees: those that are not later, in its window and in its document."""
    queries = jnp.arange(block.queries.start, block.queries.stop)[:, None]
    keys = jnp.arange(block.past.start, block.past.stop)[None]
    seen = jnp.tile(scores.seen(queries, keys), (group, 1))
    if starts is None:
        return seen
    first = jnp.tile(starts[:, block.queries], (1, group))[:, None, :, None]
    return seen[None, None] & (first <= keys[None, None].astype(starts.dtype))


def _group(a: Float[Array, "B S N H"], group: int) -> Float[Array, "B K S' H"]:
    """Lay out the queries of the `group` heads that share keys as rows of one head: by block, then by head.

    So a block of queries is one slice, and its matmuls with the keys are one each. Where N is split, K is.
    """
    batch, sequence, heads, size = a.shape
    a = a.swapaxes(1, 2)
    if group == 1:
        return a
    # [B, K, G, S, H] -> [B, K, G, blocks, rows, H] -> [B, K, blocks, G, rows, H] -> [B, K, S', H]
    a = a.reshape(batch, heads // group, group, sequence, size)
    a = a.reshape(*a.shape[:3], -1, block_rows(sequence), size)
    return a.swapaxes(2, 3).reshape(batch, heads // group, -1, size)


def _ungroup(a: Float[Array, "B K S' H"], group: int) -> Float[Array, "B S N H"]:
    """Return the inverse of `_group`."""
    batch, kv_heads, queries, size = a.shape
    if group > 1:
        a = a.reshape(batch, kv_heads, -1, group, block_rows(queries // group), size)
        a = a.swapaxes(2, 3).reshape(batch, kv_heads, group, -1, size)
        a = a.reshape(batch, kv_heads * group, -1, size)
    return a.swapaxes(1, 2)


def _blocks(sequence: int, group: int, window: int) -> list[_Block]:
    """Return all blocks of queries."""
    rows = block_rows(sequence)
    blocks = []
    for start in range(0, sequence, rows):
        end = start + rows
        first = 0
        if window:
            # In steps, because matmuls of odd sizes are slow on GPUs.
            first = max(0, start - window + 1) // BLOCK * BLOCK
        blocks.append(_Block(slice(group * start, group * end), slice(start, end), slice(first, end)))
    return blocks


def block_keys(sequence: int, window: int = 0) -> int:
    """Return how many keys a block of queries sees at most in blocked attention."""
    blocks = _blocks(sequence, 1, effective_window(window, sequence))
    return max(block.past.stop - block.past.start for block in blocks)


def block_rows(sequence: int) -> int:
    """Return how many queries blocked attention works on at a time.

    There are at most 8 blocks, since each is traced and compiled by itself, and all are equally long.
    """
    blocks = min(8, sequence // BLOCK)
    while blocks > 1 and sequence % blocks:
        blocks -= 1
    return sequence // max(blocks, 1)
