"""Say for predictions what frozen weights change: gradients that a step needs not make, weights made of codes."""

from __future__ import annotations

from jaxdist.config import Config
from jaxdist.config.matmuls import columns_of, matmuls_of
from jaxdist.config.stacks import path_to, stacks_of
from jaxdist.config.trained import learns
from jaxdist.mesh.split import Split
from jaxdist.sharding import Layout

WHOLE_BLOCK = ("block", "stage", "offload")
"""The values of `model.remat` that multiply all weights of a layer again in its backward pass."""


def learns_tables(config: Config) -> bool:
    """Return whether what stands outside of the layers is trained, so that looked-up vectors have gradients."""
    return not config.model.frozen


def reports_routers(config: Config) -> bool:
    """Return whether a step adds up and reports what its routers count: those that are frozen report nothing."""
    return config.model.traits.routed and not config.model.frozen


def forward_only(config: Config) -> frozenset[str]:
    """Return the names of parameters whose values no gradient needs because the weights behind them are frozen."""
    found = set()
    for name, stack in stacks_of(config.model).items():
        if stack.remat in WHOLE_BLOCK:
            continue
        for matmuls in columns_of(stack).values():
            if not any(learns(stack, matmul) for matmul in matmuls):
                # A norm with a bias shifts what enters these weights, which no gradient needs again.
                found |= {f"{path_to(name)}{matmul.norm}.bias" for matmul in matmuls if matmul.norm}
    return frozenset(found)


def made_of_codes(split: Split, layout: Layout) -> int:
    """Return the bytes of the weights of one layer, in the compute dtype, that are made of codes where it runs."""
    model = split.config.model
    if not model.stored_form:
        return 0
    stacks = stacks_of(model).values()
    layer = max(sum(m.elements // layout.parts(m.split) for m in matmuls_of(stack).values()) for stack in stacks)
    return split.width * layer
