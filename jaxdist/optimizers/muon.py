"""Muon (Jordan et al. 2024): the momentum of each matrix of a layer, made orthogonal, is its update.

    M <- mu M + (1 - mu) G                         momentum, mu = 0.95
    O <- Newton-Schulz((1 - mu) G + mu M)          Nesterov; 5 steps towards U V' of the matrix U S V'
    W <- W - rate (0.2 sqrt(max(rows, columns)) O + decay W)

The factor gives an update the root mean square of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training",
section 2.2), so that rates and decay of AdamW carry over. AdamW moves what is no matrix of a layer: the tables, norms,
biases and scales.

Newton-Schulz multiplies whole matrices, of which a device holds a part. One all-to-all for each dim of a matrix that
the mesh splits deals whole matrices to the devices: each gets some of the layers, or of the experts. The same
all-to-alls in the other order bring the updates back, and products need no collective at all. Matrices that do not
divide among the devices are padded with zeros. Axes that split no dim of a matrix hold copies, and compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdist.optimizers.rule import Knobs, Matrices, Roles, decaying

if TYPE_CHECKING:
    import jax
    import optax

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X <- a X + (b X X' + c (X X')^2) X, which moves singular values of 0 to 1 near 1 fast (Jordan et al. 2024)."""
RMS = 0.2
"""The root mean square of AdamW's updates."""


class MuonState(NamedTuple):
    """The state of Muon."""

    mu: Any
    """The momentum of the matrices, nested as the parameters are."""
    others: Any
    """AdamW's state of all other parameters."""


def muon(config: Knobs, rate: optax.Schedule, roles: Roles) -> optax.GradientTransformation:
    """Return Muon for the parameters whose role says how they are matrices, and AdamW for the others."""
    import optax

    decay = optax.add_decayed_weights(config.weight_decay, mask=decaying(roles))
    return optax.chain(_directions(config, roles), decay, optax.scale_by_learning_rate(rate))


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs that make one matrix orthogonal: three products a step, two of them with the smaller Gram."""
    small, large = sorted((rows, columns))
    return STEPS * (4 * small**2 * large + 2 * small**3)


def _directions(config: Knobs, roles: Roles) -> optax.GradientTransformation:
    """Return what an update is before decay and learning rate."""
    import jax
    import optax

    adam = optax.scale_by_adam(config.beta1, config.beta2)
    matrices = _selected(roles, roles, lambda role: role.matrices is not None)

    def parts(tree: Any) -> tuple[Any, Any]:
        """Return (the matrices, all else)."""
        rest = _selected(tree, roles, lambda role: role.matrices is None)
        return _selected(tree, roles, lambda role: role.matrices is not None), rest

    def init(params: Any) -> MuonState:
        of_layers, others = parts(params)
        return MuonState(optax.tree.zeros_like(of_layers), adam.init(others))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        of_layers, others = parts(updates)
        mu = jax.tree.map(lambda g, m: MOMENTUM * m + (1 - MOMENTUM) * g, of_layers, state.mu)
        ahead = jax.tree.map(lambda g, m: MOMENTUM * m + (1 - MOMENTUM) * g, of_layers, mu)
        directions = jax.tree.map(lambda role, a: orthogonal(a, role.stacked, role.matrices), matrices, ahead)
        changes, adam_state = adam.update(others, state.others)
        return _merged(directions, changes), MuonState(mu, adam_state)

    return optax.GradientTransformation(init, update)


def orthogonal(a: jax.Array, stacked: int, matrices: Matrices) -> jax.Array:
    """Return the scaled orthogonal factors of the matrices in `a`, whose first `stacked` dims count layers.

    It lies as `a` does.
    """
    first = stacked + matrices.experts
    return _on_whole(a, first, lambda whole: _each_part(whole, matrices))


def _on_whole(a: jax.Array, first: int, f: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Apply `f` to arrays [n, ...] of matrices that are whole, where the first dims of `a` count matrices.

    Each device gets its share of them, by all-to-alls, and sends it back.
    """
    import jax
    import jax.numpy as jnp

    sharding = jax.typeof(a).sharding
    axes_of = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in sharding.spec]
    # Of an array [n, ...]: the dim, and the axes that split it.
    split = [(dim - first + 1, axes) for dim, axes in enumerate(axes_of) if dim >= first and axes]
    ways = math.prod(sharding.mesh.shape[axis] for _, axes in split for axis in axes)

    def on_device(own: jax.Array) -> jax.Array:
        flat = own.reshape(-1, *own.shape[first:])
        count = len(flat)
        dealt = jnp.pad(flat, [(0, -count % ways), *((0, 0) for _ in flat.shape[1:])])
        for dim, axes in split:
            dealt = jax.lax.all_to_all(dealt, axes, split_axis=0, concat_axis=dim, tiled=True)
        dealt = f(dealt)
        for dim, axes in reversed(split):
            dealt = jax.lax.all_to_all(dealt, axes, split_axis=dim, concat_axis=0, tiled=True)
        return dealt[:count].reshape(own.shape)

    if not any(axes_of):
        return on_device(a)
    return jax.shard_map(on_device, in_specs=sharding.spec, out_specs=sharding.spec)(a)


def _each_part(whole: jax.Array, matrices: Matrices) -> jax.Array:
    """Return the scaled orthogonal factors of arrays [n, ...], of each weight that lies fused in them by itself."""
    import jax.numpy as jnp

    if matrices.fused is None:
        return _scaled(whole, matrices.inputs)
    dim = 1 + matrices.fused
    ends = [sum(matrices.places[:number]) for number in range(1, len(matrices.places))]
    return jnp.concatenate([_scaled(part, matrices.inputs) for part in jnp.split(whole, ends, axis=dim)], axis=dim)


def _scaled(whole: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    """Return the scaled orthogonal factors of arrays [n, ...], whose dims `inputs` together are the rows."""
    import jax.numpy as jnp

    rows = [1 + dim for dim in inputs]
    columns = [dim for dim in range(1, whole.ndim) if dim not in rows]
    moved = jnp.transpose(whole, (0, *rows, *columns))
    height = math.prod(whole.shape[dim] for dim in rows)
    flat = moved.reshape(len(whole), height, -1)
    made = RMS * math.sqrt(max(flat.shape[1:])) * newton_schulz(flat)
    back = sorted(range(whole.ndim), key=[0, *rows, *columns].__getitem__)
    return jnp.transpose(made.reshape(moved.shape), back)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Return an array near the orthogonal factors U V' of matrices U S V', [n, rows, columns].

    In the dtype of `x`, at least f32: singular values come out between about 0.7 and 1.2, and those of 0 stay 0.
    """
    import jax
    import jax.numpy as jnp

    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = jnp.swapaxes(x, 1, 2)
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True)) + 1e-7)

    def step(_: int, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, 1, 2)
        return a * x + (b * gram + c * (gram @ gram)) @ x

    x = jax.lax.fori_loop(0, STEPS, step, x)
    return jnp.swapaxes(x, 1, 2) if tall else x


def _selected(tree: Any, roles: Any, chosen: Callable[[Any], bool]) -> Any:
    """Return the leaves of `tree` whose role is `chosen`, in dicts that are not empty."""
    found = {}
    for name, role in roles.items():
        if not isinstance(role, dict):
            if chosen(role):
                found[name] = tree[name]
        elif part := _selected(tree[name], role, chosen):
            found[name] = part
    return found


def _merged(first: Any, second: Any) -> Any:
    """Return the leaves of both trees, of which no two have the same path."""
    both = dict(first)
    for name, branch in second.items():
        both[name] = _merged(first[name], branch) if name in first else branch
    return both
