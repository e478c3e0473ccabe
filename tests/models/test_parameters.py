"""Keys that are made ahead give the parameters that keys one by one give."""

import jax
import numpy as np
from flax import nnx

from jaxdist.models.parameters import AHEAD, WORDS, ahead, normal


def bits(keys) -> np.ndarray:
    return np.asarray(jax.random.key_data(keys))


def test_keys_are_those_of_one_parameter_after_the_other():
    """Beyond those that are made together, of each stream, and of a stream that is split in between."""
    plain, together = (nnx.Rngs(params=3, adapters=7) for _ in range(2))
    together = ahead(together)
    for number in range(AHEAD + 3):
        for name in ("params", "adapters"):
            np.testing.assert_array_equal(bits(together[name]()), bits(jax.random.split(plain[name](), WORDS)))
        if number in (0, AHEAD - 1):
            parts = (rngs.split(2) for rngs in (together, plain))
            np.testing.assert_array_equal(
                *(np.stack([bits(one.params.key[...]), bits(one.adapters.key[...])]) for one in parts)
            )


def test_a_parameter_is_the_same_from_a_key_and_from_its_parts():
    key = jax.random.key(5)
    np.testing.assert_array_equal(normal(key, (2, 3), 0.5), normal(jax.random.split(key, WORDS), (2, 3), 0.5))
