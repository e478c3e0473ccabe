"""Families that exist in tests alone: Llama whose every third layer has no window, and a mixture that begins dense."""

import jax
import pytest

from jaxdist.config.model import FAMILIES
from jaxdist.models import Model

PERIOD = ("sliding", "sliding", "full")
LAYERS = 7
"""Two periods, and the first layer of a third."""


@pytest.fixture(scope="module", autouse=True)
def llama_of_several_kinds():
    """Give llama this period for the tests of a module that imports the fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "llama", FAMILIES["llama"]._replace(period=PERIOD))
        yield


DENSE = 2
FORMS = (("dense", DENSE), ("routed", 0))
"""As DeepSeek-V2 and V3 have it: layers with an MLP, and then experts in all others."""


@pytest.fixture(scope="module", autouse=True)
def moe_of_two_forms():
    """Give moe these forms for the tests of a module that imports the fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "moe", FAMILIES["moe"]._replace(forms=FORMS))
        yield


def written_out(model: Model, params: dict, x: jax.Array) -> jax.Array:
    """The residual stream after all layers, one after the other."""
    for stack in model.stacks:
        layers = stack.of(params["blocks"])
        for i in range(len(jax.tree.leaves(layers)[0])):
            layer = jax.tree.map(lambda a, i=i: a[i], layers)
            x, _ = model.block(layer, x, kind=stack.kinds[i % len(stack.kinds)])
    return x
