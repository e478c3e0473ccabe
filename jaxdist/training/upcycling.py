"""Begin a mixture of experts with the weights of a dense run: each expert is a copy of its MLP.

This is sparse upcycling (Komatsuzaki et al. 2023, section 2.2). The weights of a token's experts add up to 1, so that
the mixture computes at first what the dense model does. What the dense model has not is new: the router, whose choice
makes the experts differ from then on, and shared experts, which add nothing at first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdist.cluster import xla_options
from jaxdist.models import Params
from jaxdist.sharding import on_devices
from jaxdist.training.run import Run

COPIED = ("gate_up", "down")
"""The parameters of an MLP, of which each expert gets a copy."""


def dense_shapes(run: Run) -> Params:
    """Return shapes, dtypes and shardings of the parameters of a dense checkpoint; call under `jax.set_mesh`."""

    def without_experts() -> Params:
        params = run.step.logical(run.traced_init()).params
        experts = params["blocks"]["mlp"]
        # Any function of the dim of experts that drops it: nothing is computed.
        mlp = {name: jnp.max(experts[name], 1) for name in COPIED}
        return _with_mlp(params, mlp)

    return on_devices(without_experts, run.mesh)


def upcycled(run: Run, dense: Params) -> Params:
    """Return the parameters of a mixture, as a checkpoint has them, from dense ones; call under `jax.set_mesh`."""

    def with_experts(dense: Params) -> Params:
        # Of the new parameters, the compiler makes those that are used.
        experts = run.step.logical(run.traced_init()).params["blocks"]["mlp"]
        copies = {name: _copies(dense["blocks"]["mlp"][name], like=experts[name]) for name in COPIED}
        mlp = {**experts, **copies}
        if "shared_down" in mlp:
            mlp["shared_down"] = jnp.zeros_like(mlp["shared_down"])
        return _with_mlp(dense, mlp)

    options = xla_options.options_for_init(run.layout.platform)
    return jax.jit(with_experts, compiler_options=options)(dense)


def _copies(w: Float[Array, "L ..."], like: Float[Array, "L E ..."]) -> Float[Array, "L E ..."]:
    """Return a copy of the weight of each layer for each expert, laid out as `like`."""
    copies = jnp.broadcast_to(w[:, None], like.shape)
    return jax.reshard(copies, jax.typeof(like).sharding.spec)


def _with_mlp(params: Params, mlp: Params) -> Params:
    return {**params, "blocks": {**params["blocks"], "mlp": mlp}}
