"""Keys that are made ahead give the parameters that keys one by one give."""

import jax
import numpy as np
from flax import nnx

from jaxdist.models.parameters import AHEAD, ahead, normal


def test_parameters_are_those_of_keys_one_by_one():
    """Beyond the keys that are made together, of each stream, and of a stream that is split in between."""
    plain, together = (nnx.Rngs(params=3, adapters=7) for _ in range(2))
    together = ahead(together)
    draw = lambda rngs: [normal(key, (2, 3), 0.5) for key in (rngs.params(), rngs.adapters())]
    for number in range(AHEAD + 3):
        np.testing.assert_array_equal(draw(together), draw(plain))
        if number in (0, AHEAD - 1):
            parts = [jax.vmap(lambda one: draw(ahead(one)))(rngs.split(2)) for rngs in (together, plain)]
            np.testing.assert_array_equal(*parts)
