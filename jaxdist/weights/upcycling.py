"""Begin a mixture of experts with the weights of a dense run: each expert is a copy of its MLP.

This is sparse upcycling (Komatsuzaki et al. 2023, section 2.2). The weights of a token's experts add up to 1, so that
the mixture computes at first what the dense model does. What the dense model has not is new: the router, whose choice
makes the experts differ from then on, and shared experts, which add nothing at first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdist.cluster import xla_options
from jaxdist.config import ModelConfig
from jaxdist.models import Params
from jaxdist.request.checks.experts import is_upcycled
from jaxdist.sharding import on_devices

if TYPE_CHECKING:
    from jaxdist.training.run import Run

COPIED = ("gate_up", "gate_up_bias", "down", "down_bias")
"""The parameters of an MLP, of which each expert gets a copy."""


class Same:
    """The weights belong to the same model."""

    remark = ""
    """What is said of them behind their name."""

    def shapes(self, abstract: Params) -> Params:
        """Return shapes, dtypes and shardings of the parameters in the checkpoint, for `abstract` ones of the run."""
        return abstract

    def grown(self, params: Params) -> Params:
        """Return the parameters of the run, as a checkpoint has them, from those in the checkpoint."""
        return params


class Upcycled(Same):
    """The weights come from a dense run, and become a mixture; both methods are called under `jax.set_mesh`."""

    remark = "; each expert is a copy of its MLP"

    def __init__(self, run: Run):
        self.run = run

    def shapes(self, abstract: Params) -> Params:
        """Return the layout of the dense parameters."""

        def without_experts() -> Params:
            params = self.run.step.logical(self.run.engine.traced_init()).params
            experts = params["blocks"]["mlp"]
            # Any function of the dim of experts that drops it: nothing is computed.
            mlp = {name: jnp.max(experts[name], 1) for name in COPIED if name in experts}
            return _with_mlp(params, mlp)

        return on_devices(without_experts, self.run.mesh)

    def grown(self, params: Params) -> Params:
        """Return the parameters of the mixture."""

        def with_experts(dense: Params) -> Params:
            # Of the new parameters, the compiler makes those that are used.
            experts = self.run.step.logical(self.run.engine.traced_init()).params["blocks"]["mlp"]
            theirs = dense["blocks"]["mlp"]
            copies = {name: _copies(theirs[name], like=experts[name]) for name in COPIED if name in experts}
            mlp = {**experts, **copies}
            if "shared_down" in mlp:
                mlp["shared_down"] = jnp.zeros_like(mlp["shared_down"])
            return _with_mlp(dense, mlp)

        options = xla_options.options_for_init(self.run.layout.platform)
        return jax.jit(with_experts, compiler_options=options)(params)


def growth(run: Run, theirs: ModelConfig) -> Same:
    """Return how the weights of a run with the model `theirs` become the weights of `run`."""
    return Upcycled(run) if is_upcycled(run.config.model, theirs) else Same()


def _copies(w: Float[Array, "L ..."], like: Float[Array, "L E ..."]) -> Float[Array, "L E ..."]:
    """Return a copy of the weight of each layer for each expert, laid out as `like`."""
    copies = jnp.broadcast_to(w[:, None], like.shape)
    return jax.reshard(copies, jax.typeof(like).sharding.spec)


def _with_mlp(params: Params, mlp: Params) -> Params:
    return {**params, "blocks": {**params["blocks"], "mlp": mlp}}
