"""Mistakes in what crosses a slow network: averages, the largest elements, scales, late gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxdist.lab.slow_networks import replicas, server, top_k
from jaxdist.parallel.crossing import codes


def the_server_adds_up_and_does_not_average(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server, "update", lambda w, gradients: w - 0.1 * sum(gradients))


def nothing_crosses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replicas, "mean", lambda x: x)


def half_of_what_waits_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(top_k, "left", lambda x, sent: (x - sent) / 2)


def twice_as_many_elements_are_sent(patch: pytest.MonkeyPatch) -> None:
    largest = top_k.largest
    patch.setattr(top_k, "largest", lambda x, density, form: largest(x, 2 * density, form))


def twice_as_many_of_a_block_are_exact(patch: pytest.MonkeyPatch) -> None:
    largest = codes._largest
    patch.setattr(codes, "_largest", lambda x, count: largest(x, 2 * count))


def the_first_of_a_block_count_as_its_largest(patch: pytest.MonkeyPatch) -> None:
    top_k = jax.lax.top_k
    patch.setattr(jax.lax, "top_k", lambda x, count: top_k(jnp.zeros_like(x), count))


def scales_are_lost(patch: pytest.MonkeyPatch) -> None:
    def without(sent: jax.Array) -> jax.Array:
        return sent[..., : codes.BLOCK].astype(jnp.float32) / 127

    patch.setattr(codes, "_from_int8", without)


def the_own_gradient_stays_in(patch: pytest.MonkeyPatch) -> None:
    """It is counted once by its worker, and once more in the mean that arrives late."""

    def twice(w: jax.Array, g: jax.Array, old: jax.Array, rate: float) -> jax.Array:
        return w - rate * (g + replicas.mean(old))

    patch.setitem(replicas.RULES, "delayed averaging", twice)
