"""Mistakes in single messages, and in the collectives of weights and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxdist.lab.reductions import algorithms, execute
from jaxdist.mesh import DATA
from jaxdist.parallel import zero


def the_first_message_is_halved(patch: pytest.MonkeyPatch) -> None:
    """Of all that a node sends in an all-reduce: its numbers, not its length."""
    apart = execute.apart
    # All-reduces run in a process of their own, where a patch of this one does not arrive.
    patch.setattr(execute, "apart", lambda function, *arguments: apart(halved_there, function, *arguments))
    patch.setattr(execute, "_done", {})
    patch.setattr(algorithms.Network, "send", halving(algorithms.Network.send))


def halved_there(function: Callable[..., Any], *arguments: Any) -> Any:
    algorithms.Network.send = halving(algorithms.Network.send)
    return function(*arguments)


def halving(send: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def halved(self: algorithms.Network, message: jax.Array, pairs: Any) -> jax.Array:
        arrives = send(self, message, pairs)
        return arrives if len(self.sent) > 1 else arrives / 2

    return halved


def every_message_is_sent_twice(patch: pytest.MonkeyPatch) -> None:
    apart = execute.apart
    patch.setattr(execute, "apart", lambda function, *arguments: apart(sent_twice_there, function, *arguments))


def sent_twice_there(function: Callable[..., Any], *arguments: Any) -> Any:
    send = algorithms.Network.send
    algorithms.Network.send = lambda self, message, pairs: send(self, message, pairs) + send(self, 2 * message, pairs)
    return function(*arguments)


def every_message_is_halved(patch: pytest.MonkeyPatch) -> None:
    send = algorithms.Network.send
    patch.setattr(algorithms.Network, "send", lambda self, message, pairs: send(self, message, pairs) / 2)


def gradients_are_averaged_and_not_summed(patch: pytest.MonkeyPatch) -> None:
    add_up = zero._reduce_scatter
    patch.setattr(zero, "_reduce_scatter", lambda place, g: add_up(place, g) / jax.lax.axis_size(DATA))


def weights_come_from_the_next_device(patch: pytest.MonkeyPatch) -> None:
    """Each device gives the shard of the one behind it to the all-gather."""
    all_gather = jax.lax.all_gather

    def of_the_next(x: jax.Array, axis_name: Any, **more: Any) -> jax.Array:
        ranks = jax.lax.axis_size(axis_name)
        behind = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        return all_gather(jax.lax.ppermute(x, axis_name, behind), axis_name, **more)

    patch.setattr(jax.lax, "all_gather", of_the_next)
