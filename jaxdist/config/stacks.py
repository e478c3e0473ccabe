"""The layers of a decoder as stacks: layers in a row that have the same parameters. No jax here.

A stack is a model by itself, of layers of one form: what is asked of one layer (its matmuls, what it keeps, what it
sends) is asked of a stack, and what is asked of all layers is a sum over stacks. Most families have one stack, which
is the model itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jaxdist.config.model import Kind, ModelConfig, Traits

FORMS: dict[str, dict[str, Any]] = {"dense": {"routed": False}, "routed": {"routed": True}}
"""The forms that layers of one family may have, with what their traits are in place of the family's."""


class StackConfig(ModelConfig):
    """The configuration of a stack, which is one of several: that of a model with these layers alone."""

    form: str
    """One of `FORMS`, by which the stack is called among the parameters."""
    first: int
    """The number of its first layer in the model."""
    model: ModelConfig
    """The model that has it."""

    @property
    def traits(self) -> Traits:
        """The traits of these layers."""
        return self.model.traits._replace(**FORMS[self.form], forms=())

    @property
    def depth(self) -> int:
        """The layers of the model."""
        return self.model.depth

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of the layers of one period, which begins where the stack does."""
        kinds = self.model.kinds
        turn = self.first % len(kinds)
        return kinds[turn:] + kinds[:turn]


def stacks_of(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return the stacks of a decoder by their names, first to last; the name of the only one is empty."""
    forms = config.traits.forms
    return _cut(config, forms) if forms else {"": config}


def forms_of(config: ModelConfig) -> str:
    """Return the forms of the layers, such as `dense and routed`; empty where all have the same parameters."""
    return " and ".join(form for form, _ in config.traits.forms)


def why_no_stages(config: ModelConfig) -> str:
    """Return why the layers make no stages of a pipeline; empty where they do.

    Stages are cut between periods, and layers of another form before them would shift where a period begins.
    """
    forms = forms_of(config)
    if not forms or len(config.kinds) == 1:
        return ""
    return (
        f"the layers of {config.family} are {forms}, with different parameters, and model.period has several kinds, "
        f"of which a pipeline makes no stages; set pipeline to 1, and split the layers over model, data and expert"
    )


def most_chunks(config: ModelConfig) -> int:
    """Return the most chunks that the layers make for a pipeline: each has a period, or a layer of the last form."""
    *_, last = stacks_of(config).values()
    return last.periods


def first_layers(config: ModelConfig) -> dict[str, int]:
    """Return the number of the first layer of each stack, by the names of the stacks."""
    found = {}
    first = 0
    for name, stack in stacks_of(config).items():
        found[name] = first
        first += stack.layers
    return found


def path_to(stack: str) -> str:
    """Return how the paths to the parameters of a stack begin, such as "blocks." and "blocks.dense."."""
    return f"blocks.{stack}." if stack else "blocks."


# A search asks for the stacks of one model, thousands of times.
@lru_cache(maxsize=16)
def _cut(config: ModelConfig, forms: tuple[tuple[str, int], ...]) -> dict[str, ModelConfig]:
    """Return the stacks of a model whose layers have these forms, as `Traits.forms` lists them."""
    stacks: dict[str, ModelConfig] = {}
    first = 0
    for form, count in forms:
        layers = min(count, config.layers - first)
        if form == forms[-1][0]:
            layers = config.layers - first
        if layers:
            known = dict(config) | {"layers": layers, "form": form, "first": first, "model": config}
            stacks[form] = StackConfig.model_construct(**known)
        first += layers
    if len(stacks) == 1:
        return {"": next(iter(stacks.values()))}
    return stacks
