"""Conditional computation: many experts, few for each token (GShard, Lepikhin et al. 2021; Fedus et al. 2022)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ModelConfig
from jaxdist.lab import routing
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.models.experts import Experts
from jaxdist.output.tables import table
from jaxdist.sharding import Layout

TOKENS = 1024
EMBED = 64


class Cost(NamedTuple):
    """What a layer of experts holds and computes."""

    parameters: int
    flops: float
    """Of the forward and the backward pass, in the compiled program."""


def cost(experts: int, per_token: int) -> Cost:
    """Compile a layer of this number of experts on one device.

    The first round has room for the even share: as many rows as the tokens have choices, whatever the number of
    experts. XLA counts one further round, because their number is not known before the router has chosen.
    """
    config = ModelConfig(
        family="moe",
        embed=EMBED,
        experts=experts,
        experts_per_token=per_token,
        expert_mlp=512,
        capacity_factor=1.0,
        sequence=TOKENS,
    )
    mesh = cpu_mesh("1x1x1")
    layout = Layout.on(mesh)
    layer = nnx.eval_shape(lambda: Experts(config, layout, nnx.Rngs(params=0)))
    graph, state = nnx.split(layer)
    weights = nnx.to_pure_dict(state)
    x = jax.ShapeDtypeStruct((1, TOKENS, config.embed), jnp.float32)

    def passes(weights, x, dy):
        y, vjp, _ = jax.vjp(lambda weights, x: nnx.merge(graph, weights)(x), weights, x, has_aux=True)
        return y, vjp(dy)

    with jax.set_mesh(mesh):
        compiled = jax.jit(passes).lower(weights, x, x).compile()
    return Cost(sum(w.size for w in jax.tree.leaves(weights)), compiled.cost_analysis()["flops"])


def router_flops(experts: int) -> int:
    """Return the FLOPs of the router's product and of its two gradients: arithmetic."""
    return 3 * 2 * TOKENS * EMBED * experts


def conditional(claim: Claim, counts: tuple[int, ...] = (4, 16, 64), per_token: int | None = 2) -> Outcome:
    """Measure the FLOPs with the most experts over those with the fewest, without the router's products.

    Each token goes through `per_token` experts, or through all of them if that is None.
    """
    found = {experts: cost(experts, per_token or experts) for experts in counts}
    least = found[min(counts)]
    apart = {experts: one.flops - router_flops(experts) for experts, one in found.items()}
    rows = [("experts", "per token", "parameters", "FLOPs", "parameters, x", "FLOPs, x", "router apart, x")]
    for experts, one in found.items():
        rows.append(
            (
                str(experts),
                str(per_token or experts),
                f"{one.parameters:,}",
                f"{one.flops:.4g}",
                f"{one.parameters / least.parameters:.2f}",
                f"{one.flops / least.flops:.3f}",
                f"{apart[experts] / apart[min(counts)]:.3f}",
            )
        )
    value = apart[max(counts)] / apart[min(counts)]
    lines = (
        f"forward and backward pass of a layer, {TOKENS} tokens, as XLA counts them in the compiled program:",
        *table(rows),
        "The router has one column of weights for each expert: its products, and its choice, are what grows.",
    )
    return Outcome(value, claim.met(value), lines, routing.picture)


CHECKS = {"moe-conditional": Check(conditional, {"per_token": None})}
