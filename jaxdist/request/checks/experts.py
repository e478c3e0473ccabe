"""Check the experts of a mixture, and the axis of the mesh that splits them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxdist.config import Config
from jaxdist.mesh import DATA, EXPERT
from jaxdist.request.checks.mesh import fit
from jaxdist.request.checks.registry import check, unused
from jaxdist.units import closest, divisors, multiples, remedy, to

OF_EXPERTS = (
    "experts",
    "experts_per_token",
    "expert_mlp",
    "shared_experts",
    "router",
    "router_renormalize",
    "router_scale",
    "balance_rate",
    "balance_loss",
    "z_loss",
    "capacity_factor",
)
"""Knobs that only mixtures of experts use."""


@check("model.family", *(f"model.{name}" for name in OF_EXPERTS))
def _no_experts(config: Config) -> Iterator[str]:
    if not config.model.traits.routed:
        for name in OF_EXPERTS:
            yield from unused(config, f"model.{name}", f"model.family {config.model.family}, which has no experts,")


@check("model.family", "model.mlp", "model.expert_mlp")
def _two_widths(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.routed and model.expert_mlp:
        yield from unused(config, "model.mlp", f"model.family {model.family} with model.expert_mlp {model.expert_mlp}")


@check("model.family", "model.experts", "model.experts_per_token")
def _chosen(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.routed and model.experts_per_token > model.experts:
        yield (
            f"model.experts_per_token {model.experts_per_token} is more than model.experts {model.experts}; "
            + remedy(to("model.experts_per_token", [model.experts]), to("model.experts", [model.experts_per_token]))
        )


@fit("model.family")
def _axis_without_experts(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    if shape[EXPERT] > 1 and not config.model.traits.routed:
        yield (
            f"mesh {config.mesh} has {EXPERT}={shape[EXPERT]}, but model.family {config.model.family} has no experts; "
            f"give those devices to {DATA}"
        )


@fit("model.family", "model.experts")
def _experts(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    experts = config.model.experts
    ways = shape[EXPERT]
    if config.model.traits.routed and experts % ways:
        fewer_ways = closest(divisors(experts), ways)
        yield f"model.experts {experts} does not divide by {EXPERT}={ways} (mesh {config.mesh}); " + remedy(
            to("model.experts", multiples(ways, experts)), to(f"the {EXPERT} axis", fewer_ways)
        )
