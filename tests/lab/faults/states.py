"""Mistakes in where the model's states lie, in what the optimizer keeps, and in how gradients are reduced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P
from jax.sharding import reshard

from jaxdist import sharding
from jaxdist.mesh import DATA
from jaxdist.models import Params
from jaxdist.parallel import placing, sink, zero
from jaxdist.parallel.placement import Placement
from jaxdist.parallel.region import vary
from jaxdist.training import run
from jaxdist.training.forward import step
from jaxdist.training.forward.decoder import DecoderForward


def the_optimizer_is_replicated(patch: pytest.MonkeyPatch) -> None:
    build = run.optimizer

    def replicated(*arguments: object) -> optax.GradientTransformation:
        rule = build(*arguments)

        def init(params: Params) -> optax.OptState:
            return rule.init(jax.tree.map(lambda w: reshard(w, P()), params))

        return rule._replace(init=init)

    patch.setattr(run, "optimizer", replicated)


def the_optimizer_state_stays_on_the_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "to_host", lambda tree: tree)


def accumulators_are_whole(patch: pytest.MonkeyPatch) -> None:
    for module, name in ((sink, "zeros"), (zero, "reduced_sums")):
        patch.setattr(module, name, lambda place, shape, dtype: jnp.zeros(shape, dtype))


def weights_are_gathered_before_the_step(patch: pytest.MonkeyPatch) -> None:
    """At stage 3 too."""

    def gathered(self: DecoderForward, params: Params) -> Params:
        return jax.tree.map(lambda p, w: zero.gather(p, w.astype(self.dtype)), self.places, params)

    patch.setattr(DecoderForward, "weights", gathered)


def stage_0_is_stage_1(patch: pytest.MonkeyPatch) -> None:
    placements = placing.placements

    def at_least_1(layout: sharding.Layout, axes: Any, abstract: Any, zero: placing.ZeroOptions, **more: Any) -> Any:
        return placements(layout, axes, abstract, replace(zero, stage=max(zero.stage, 1)), **more)

    patch.setattr(placing, "placements", at_least_1)


def every_stage_is_stage_0(patch: pytest.MonkeyPatch) -> None:
    placements = placing.placements

    def whole(layout: sharding.Layout, axes: Any, abstract: Any, zero: placing.ZeroOptions, **more: Any) -> Any:
        return placements(layout, axes, abstract, replace(zero, stage=0), **more)

    patch.setattr(placing, "placements", whole)


def masters_are_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    init = DecoderForward.init

    def halved(self: DecoderForward, key: jax.Array) -> tuple:
        params, variables = init(self, key)
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), variables

    patch.setattr(DecoderForward, "init", halved)


def a_third_moment_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The largest second moment so far."""
    patch.setattr(optax, "adamw", lambda rate, b1, b2, **more: optax.amsgrad(rate, b1, b2))


def the_betas_are_swapped(patch: pytest.MonkeyPatch) -> None:
    adamw = optax.adamw
    patch.setattr(optax, "adamw", lambda rate, b1, b2, **more: adamw(rate, b2, b1, **more))


def the_updates_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Each is the first, and corrects the moments by 1 - beta."""
    adamw = optax.adamw

    def uncounted(*arguments: object, **more: object) -> optax.GradientTransformation:
        rule = adamw(*arguments, **more)

        def update(grads: Params, state: optax.OptState, *others: Any) -> Any:
            return rule.update(grads, optax.tree_utils.tree_set(state, count=jnp.int32(0)), *others)

        return rule._replace(update=update)

    patch.setattr(optax, "adamw", uncounted)


def updates_are_made_whole(patch: pytest.MonkeyPatch) -> None:
    """Each device gathers the whole gradient, and makes the whole update, of which it keeps its shard."""
    build = run.optimizer

    def whole(*arguments: object) -> optax.GradientTransformation:
        rule = build(*arguments)

        def update(grads: Params, *more: Any) -> Any:
            gathered = jax.tree.map(lambda g: reshard(reshard(g, P()), jax.typeof(g).sharding.spec), grads)
            return rule.update(gathered, *more)

        return rule._replace(update=update)

    patch.setattr(run, "optimizer", whole)


def gradients_are_summed_whole_and_then_cut(patch: pytest.MonkeyPatch) -> None:
    def all_reduce(place: Placement, g: jax.Array) -> jax.Array:
        size = g.shape[place.shard_dim] // jax.lax.axis_size(DATA)
        start = jax.lax.axis_index(DATA) * size
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(g, DATA), start, size, place.shard_dim)

    patch.setattr(zero, "_reduce_scatter", all_reduce)


def gradients_are_reduced_twice(patch: pytest.MonkeyPatch) -> None:
    reduce = zero.reduce_manual
    patch.setattr(zero, "reduce_manual", lambda place, g: reduce(place, vary(reduce(place, g), (DATA,))))
