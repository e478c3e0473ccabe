"""Check the experts of a mixture, and the axis of the mesh that splits them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxdist.config import FAMILIES, Config, ModelConfig, RequestError
from jaxdist.mesh import DATA, EXPERT
from jaxdist.mesh.split import Split
from jaxdist.output.units import closest, divisors, multiples, remedy, to
from jaxdist.request.checks.mesh import fit
from jaxdist.request.checks.registry import check


@check("model.family", "model.experts", "model.experts_per_token")
def _chosen(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.routed and model.experts_per_token > model.experts:
        yield (
            f"model.experts_per_token {model.experts_per_token} is more than model.experts {model.experts}; "
            + remedy(to("model.experts_per_token", [model.experts]), to("model.experts", [model.experts_per_token]))
        )


@check("model.family", "model.dense_layers", "model.layers")
def _some_have_experts(config: Config) -> Iterator[str]:
    model = config.model
    if FAMILIES[model.family].routed and model.dense_layers >= model.layers:
        yield (
            f"model.dense_layers {model.dense_layers} leaves no layer with experts of model.layers {model.layers}; "
            + remedy(to("model.dense_layers", [model.layers - 1]), to("model.layers", [model.dense_layers + 1]))
        )


@check(
    "model.family",
    "model.experts",
    "model.experts_per_token",
    *("model.router_group_score", "model.router_groups", "model.router_groups_kept"),
)
def _groups(config: Config) -> Iterator[str]:
    model = config.model
    if not FAMILIES[model.family].routed or model.router_group_score == "none":
        return
    groups = model.router_groups
    size, rest = divmod(model.experts, groups)
    if rest:
        yield f"model.experts {model.experts} does not divide by model.router_groups {groups}; " + remedy(
            to("model.router_groups", closest(divisors(model.experts), groups)),
            to("model.experts", multiples(groups, model.experts)),
        )
        return
    if model.router_group_score == "best-two" and size < 2:
        yield (
            f"model.router_group_score best-two adds the two best scores of a group, and each of model.router_groups "
            f"{groups} has 1 expert; set model.router_groups to at most {max(1, model.experts // 2)}"
        )
    if model.router_groups_kept > groups:
        yield (
            f"model.router_groups_kept {model.router_groups_kept} is more than model.router_groups {groups}; "
            + remedy(to("model.router_groups_kept", [groups]))
        )
    elif model.router_groups_kept * size < model.experts_per_token:
        enough = -(-model.experts_per_token // size)
        yield (
            f"model.router_groups_kept {model.router_groups_kept} leaves {model.router_groups_kept * size} experts to "
            f"choose from, and model.experts_per_token is {model.experts_per_token}; "
            + remedy(to("model.router_groups_kept", [enough]))
        )


@fit("model.family")
def _axis_without_experts(split: Split) -> Iterator[str]:
    config = split.config
    if split.size(EXPERT) > 1 and not config.model.traits.routed:
        yield (
            f"mesh {config.mesh} has {EXPERT}={split.size(EXPERT)}, but model.family {config.model.family} has no "
            f"experts; give those devices to {DATA}"
        )


@fit("model.family", "model.experts")
def _experts(split: Split) -> Iterator[str]:
    config = split.config
    experts = config.model.experts
    ways = split.size(EXPERT)
    if config.model.traits.routed and experts % ways:
        fewer_ways = closest(divisors(experts), ways)
        yield f"model.experts {experts} does not divide by {EXPERT}={ways} (mesh {config.mesh}); " + remedy(
            to("model.experts", multiples(ways, experts)), to(f"the {EXPERT} axis", fewer_ways)
        )


def is_upcycled(model: ModelConfig, dense: ModelConfig) -> bool:
    """Return whether `model` is a mixture of experts that a run of the model `dense` would have to become."""
    return model.traits.routed and dense.family != model.family


def check_upcycling(model: ModelConfig, dense: ModelConfig, folder: Path) -> None:
    """Raise `RequestError` where a mixture cannot compute at first what the dense run in `folder` does.

    `dense` is the model of that run, of any family but that of `model`.
    """
    of_one_mlp = FAMILIES[model.family]._replace(routed=False)
    families = [name for name, traits in FAMILIES.items() if traits == of_one_mlp]
    if dense.family not in families:
        raise RequestError(
            f"init_from '{folder}' is a run of model.family {dense.family}, whose layers are not those of "
            f"{model.family}; begin with a run of {' or '.join([*families, model.family])}"
        )
    if model.traits.forms:
        raise RequestError(
            f"init_from '{folder}' is a run of model.family {dense.family}, whose layers have one form, and those of "
            f"{model.family} have several; begin with a run of {model.family}"
        )
    because = f"but init_from '{folder}' is a dense run, and its MLP is each expert of a token at first"
    problems = []
    if not model.router_renormalize:
        problems.append(
            f"model.router_renormalize is false, {because}: set it to true, so that their weights add up to 1"
        )
    if model.router_scale != 1:
        problems.append(f"model.router_scale is {model.router_scale:g}, {because}: leave it out, which means 1")
    if model.expert_size != dense.mlp_size:
        problems.append(
            f"the experts have a width of {model.expert_size}, {because}: set model.expert_mlp to {dense.mlp_size}"
        )
    if problems:
        raise RequestError(*problems)
