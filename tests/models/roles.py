"""The roles of a model's parameters, without a mesh."""

import jax

from jaxdist.models import Model, Params
from jaxdist.models.foreign import Foreign
from jaxdist.parallel.placing import is_axes, role_of


def roles(model: Model | Foreign) -> Params:
    return jax.tree.map(role_of, model.axes, is_leaf=is_axes)


def decaying(model: Model | Foreign) -> Params:
    """Which parameters decay."""
    return jax.tree.map(lambda role: role.decays, roles(model))
