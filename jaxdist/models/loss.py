"""Cross-entropy of a language model, fused with the output projection and its gradient.

It runs in a manual region, its own or a pipeline's, where chunks are cut from the part of a row that a device holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.models.scores import soft_cap_slope, soft_capped
from jaxdist.parallel import region
from jaxdist.parallel.tensor import leave
from jaxdist.parallel.vocabulary import first_token, tokens_of, without_added
from jaxdist.sharding import BATCH, RESIDUAL, SEQUENCE, Layout, wide

CHUNK_ROWS = dict(cpu=256, gpu=4096)
"""Rows of logits that exist at a time on one device, by platform. Few stay in a CPU's cache; but each chunk reads and
writes the whole gradient of the table, which on a GPU takes as long as 2 D rows of bfloat16 logits do."""


class Form(NamedTuple):
    """What becomes of the products of the residual stream with the table before they are logits."""

    size: int | None
    """The vocabulary's size, beyond which rows of the table have no part; None: all have."""
    cap: float
    """The soft cap of logits; 0: none."""


Sums = tuple[jax.Array, jax.Array, jax.Array]
"""(loss, gradient of x, gradient of the table), added up chunk by chunk."""


def cross_entropy(
    layout: Layout,
    x: Float[Array, "k B s D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "k B S"],
    size: int | None = None,
    cap: float = 0.0,
) -> Float[Array, ""]:
    """Sum log sum exp(x E^T) - (x E^T)[label] over all labels that are not negative (padding), in nats, in f32.

    Neither pass holds a B*S x V array: the rows are taken in chunks, and each chunk's gradient (softmax minus one-hot)
    is used for dx and dE while it is there, so the backward pass only scales what the forward pass has made: three
    matmuls in place of four. Chunks are cut along S, which leaves B split over the devices as it is. Where the
    vocabulary is split, each device has its own columns of the logits, and only sums over them travel.

    Rows of the table beyond the vocabulary's `size` have no part in the loss (`parallel.vocabulary`); None takes all.

    Logits have the soft `cap` of `models.scores.soft_capped`; 0 is none.

    On a GPU logits are kept in the dtype of `x`, elsewhere in f32 at least; what is computed from them is in f32.
    """
    if layout.manual:
        return _fused(layout, Form(size, cap), x, table, labels)

    def local(inner: Layout, x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
        return region.add_up(_fused(inner, Form(size, cap), x, table, labels), layout.tokens_over)

    return _in_region(layout, local, (), x, table, labels)


def row_losses(
    layout: Layout,
    x: Float[Array, "k B s D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "k B S"],
    size: int | None = None,
    cap: float = 0.0,
) -> Float[Array, "k B"]:
    """Return the sums that `cross_entropy` adds up over all rows, row by row.

    A gradient may weigh each row by itself, which is not known before all losses are: the backward pass makes the
    logits again, which `cross_entropy` does not need.
    """

    def local(inner: Layout, x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
        # Devices that share a row add up their parts.
        return region.add_up(_row_sums(inner, Form(size, cap), x, table, labels), inner.split(SEQUENCE))

    if layout.manual:
        return local(layout, x, table, labels)
    return _in_region(layout, local, (None, BATCH), x, table, labels)


def _in_region(
    layout: Layout,
    local: Callable[[Layout, jax.Array, jax.Array, jax.Array], jax.Array],
    result: tuple[str | None, ...],
    x: jax.Array,
    table: jax.Array,
    labels: jax.Array,
) -> jax.Array:
    """Return `local(layout, x, table, labels)` of each device's parts; `result` are the logical axes of its dims."""
    inner = replace(layout, manual=True)
    table_spec = jax.typeof(table).sharding.spec

    def on_device(x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
        return local(inner, x, region.vary(table, table_spec.reduced), labels)

    stream = layout.spec((None, BATCH, RESIDUAL, "embed"))
    specs = stream, table_spec, layout.spec((None, BATCH, SEQUENCE))
    return jax.shard_map(on_device, in_specs=specs, out_specs=layout.spec(result))(x, table, labels)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row_sums(layout: Layout, form: Form, x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
    """Return this device's part of the loss of each row, [k, B], in the manual region."""

    def micro_batch(_: None, part: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x, labels = part
        x = _whole_sequence(layout, x)
        length, starts = _chunks(layout, x)

        def chunk(sums: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
            products = _products(layout, _cut(x, at, length), table)
            _, lse = _logits(layout, form, products)
            return sums + jnp.sum(_nll(layout, form, products, lse, _cut(labels, at, length)), axis=1), None

        zeros = region.zeros(labels.shape[:1], wide(x.dtype), region.varying(labels))
        return None, jax.lax.scan(chunk, zeros, starts)[0]

    return jax.lax.scan(micro_batch, None, (x, labels))[1]


def _row_sums_forward(
    layout: Layout, form: Form, x: jax.Array, table: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _row_sums(layout, form, x, table, labels), (x, table, labels)


def _row_sums_backward(
    layout: Layout, form: Form, saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, table, labels = saved
    _, dx, d_table = _with_gradients(layout, form, x, table, labels, g)
    return dx, _turned(layout, d_table).astype(table.dtype), None


_row_sums.defvjp(_row_sums_forward, _row_sums_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(layout: Layout, form: Form, x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
    def micro_batch(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, labels = part
        x = _whole_sequence(layout, x)
        length, starts = _chunks(layout, x)

        def chunk(total: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
            products = _products(layout, _cut(x, at, length), table)
            _, lse = _logits(layout, form, products)
            return total + jnp.sum(_nll(layout, form, products, lse, _cut(labels, at, length))), None

        return jax.lax.scan(chunk, total, starts)

    return jax.lax.scan(micro_batch, region.zeros((), wide(x.dtype), region.varying(labels)), (x, labels))[0]


def _fused_forward(
    layout: Layout, form: Form, x: jax.Array, table: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Return the loss, and as residuals its gradients for a cotangent of 1."""
    loss, dx, d_table = _with_gradients(layout, form, x, table, labels)
    return loss, (dx, d_table, table)


def _with_gradients(
    layout: Layout,
    form: Form,
    x: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    weights: Float[Array, "k B"] | None = None,
) -> Sums:
    """Return the summed loss and its gradients, that of the table `_turned`; `weights` weigh the gradients of rows."""
    # Of a sequence that is gathered here, all devices that share it have the same.
    axes = region.varying(x, table) - (set(layout.sequence_parallel) - region.varying(table))

    def micro_batch(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        x, labels, *weight = part
        x = _whole_sequence(layout, x)
        length, starts = _chunks(layout, x)

        def chunk(carry: Sums, at: jax.Array) -> tuple[Sums, None]:
            loss, dx, d_table = carry
            part = _cut(x, at, length)
            ids = _cut(labels, at, length)
            products = _products(layout, part, table)
            logits, lse = _logits(layout, form, products)
            hit = tokens_of(layout, logits) == ids[..., None]
            # The gradient of the logits: softmax minus one-hot, zero for padding; times the slope of their cap.
            g = jnp.where((ids >= 0)[..., None], jnp.exp(logits - lse) - hit, 0)
            for of_rows in weight:
                g = g * of_rows[:, None, None]
            g = (g * soft_cap_slope(logits, form.cap)).astype(x.dtype)
            # Each device has its columns of the vocabulary, so its dx is a partial sum until `leave`.
            dx_part = jnp.einsum("BSV,VD->BSD", g, table)
            dx = jax.lax.dynamic_update_slice_in_dim(dx, dx_part, at, axis=1)
            d_table += _table_gradient(layout, part, g, table)
            return (loss + jnp.sum(_nll(layout, form, products, lse, ids)), dx, d_table), None

        loss, d_table = carry
        dx = region.zeros(x.shape, x.dtype, axes)
        loss, dx, d_table = jax.lax.scan(chunk, (loss, dx, d_table), starts)[0]
        return (loss, d_table), leave(layout, dx, layout.split("vocab"))

    turned = _turned(layout, table)
    zeros = region.zeros(turned.shape, wide(table.dtype), axes)
    zero = region.zeros((), wide(x.dtype), region.varying(labels))
    parts = (x, labels) if weights is None else (x, labels, weights)
    (loss, d_table), dx = jax.lax.scan(micro_batch, (zero, zeros), parts)
    return loss, dx, d_table


def _fused_backward(
    layout: Layout, form: Form, saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    dx, d_table, table = saved
    # Rounded after the product, because float16 may not hold `g` itself.
    dx = (dx.astype(g.dtype) * g).astype(dx.dtype)
    d_table = _turned(layout, d_table * g).astype(table.dtype)
    return dx, d_table, None


_fused.defvjp(_fused_forward, _fused_backward)


def _table_gradient(layout: Layout, x: jax.Array, g: jax.Array, table: jax.Array) -> jax.Array:
    """Return a chunk's gradient of the table: [V, D], or on CPUs [D, V]."""
    contract = partial(jnp.einsum, preferred_element_type=wide(table.dtype))
    if layout.platform != "cpu":
        return contract("BSV,BSD->VD", g, x)
    # `x` is transposed, and not `g`, which is larger: see `parallel.matmul_cpu`.
    return contract("DBS,BSV->DV", jax.lax.optimization_barrier(jnp.einsum("BSD->DBS", x)), g)


def _turned(layout: Layout, table: jax.Array) -> jax.Array:
    """Transpose [V, D] to the order in which `_table_gradient` comes out on this platform, or back."""
    return table.T if layout.platform == "cpu" else table


def chunk_rows(layout: Layout) -> int:
    """Return how many rows of logits exist at a time on one device."""
    return CHUNK_ROWS.get(layout.platform, CHUNK_ROWS["gpu"])


def chunk_length(layout: Layout, sequence: int, rows: int) -> int:
    """Return how many tokens a chunk takes from each of a device's `rows`: with all rows about `chunk_rows`.

    The length divides `sequence`, so that all chunks are equally long; it is at least 1.
    """
    length = max(1, min(sequence, chunk_rows(layout) // rows))
    while sequence % length:
        length -= 1
    return length


def _products(layout: Layout, x: jax.Array, table: jax.Array) -> jax.Array:
    """Return the products of a chunk of the residual stream with the table, as they are held in memory."""
    kept = wide(x.dtype) if layout.platform == "cpu" else x.dtype
    return jnp.einsum("BSD,VD->BSV", x, table, preferred_element_type=kept)


def _logits(layout: Layout, form: Form, products: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logits, and their log sum exp, in f32 at least."""
    # XLA fuses the cast into what uses it, which makes no array.
    logits = soft_capped(products.astype(wide(products.dtype)), form.cap)
    if form.size is not None:
        logits = without_added(layout, logits, form.size)
    return logits, _log_sum_exp(layout, logits)


def _log_sum_exp(layout: Layout, logits: jax.Array) -> jax.Array:
    """Return the log sum exp over the vocabulary, [B, S, 1]."""
    highest, total = (_in_two_passes if layout.platform == "cpu" else _in_one_pass)(logits)
    vocab = layout.split("vocab")
    if vocab:
        # Each device has its own columns.
        own = highest
        highest = jax.lax.pmax(own, vocab)
        total = region.add_up(total * jnp.exp(own - highest), vocab)
    return (highest + jnp.log(total))[..., None]


def _in_two_passes(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum m of each row of logits, and its sum of exp(logit - m)."""
    # Not minus infinity, even where all columns of a device are beyond the vocabulary.
    highest = jnp.max(logits, -1, initial=jnp.finfo(logits.dtype).min)
    return highest, jnp.sum(jnp.exp(logits - highest[..., None]), -1)


def _in_one_pass(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `_in_two_passes` does, and read the logits once (Milakov and Gimelshein 2018, algorithm 3).

    On a GPU, where a chunk of logits does not stay in the cache, a pass takes as long as reading them.
    """

    def both(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return (maximum, sum) of two parts of a row."""
        first_highest, first = a
        second_highest, second = b
        lower = jnp.exp(-jnp.abs(first_highest - second_highest))
        in_first = first_highest >= second_highest
        total = jnp.where(in_first, first + second * lower, first * lower + second)
        return jnp.maximum(first_highest, second_highest), total

    axes = region.varying(logits)
    lowest = region.vary(jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype), axes)
    ones = region.vary(jnp.ones(logits.shape, logits.dtype), axes)
    nothing = region.zeros((), logits.dtype, axes)
    return jax.lax.reduce((logits, ones), (lowest, nothing), both, dimensions=(logits.ndim - 1,))


def _nll(layout: Layout, form: Form, products: jax.Array, lse: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the negative log likelihood of each label, [B, S]; 0 where the label is negative."""
    columns = products.shape[-1]
    # Where the vocabulary is split, most labels are in no column of this device.
    at = labels - first_token(layout, columns)
    here = (at >= 0) & (at < columns)
    target = jnp.take_along_axis(products, jnp.where(here, at, 0)[..., None], axis=-1)[..., 0]
    target = soft_capped(target.astype(lse.dtype), form.cap)
    target = region.add_up(jnp.where(here, target, 0), layout.split("vocab"))
    return jnp.where(labels >= 0, lse[..., 0] - target, 0)


def _whole_sequence(layout: Layout, x: jax.Array) -> jax.Array:
    """Return `x` with what sequence parallelism splits gathered."""
    stream = layout.sequence_parallel
    if not stream:
        return x
    return jax.lax.all_gather(x, stream, axis=1, tiled=True, to="invarying")


def _chunks(layout: Layout, x: jax.Array) -> tuple[int, jax.Array]:
    """Return (the length of a chunk along S, where chunks start): about `CHUNK_ROWS` rows on a device."""
    batch, sequence = x.shape[:2]
    length = chunk_length(layout, sequence, batch)
    return length, jnp.arange(0, sequence, length)


def _cut(a: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Return a chunk along S."""
    return jax.lax.dynamic_slice_in_dim(a, start, length, axis=1)
