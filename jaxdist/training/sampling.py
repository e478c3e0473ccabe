"""Choose the next token: the likeliest one, or a draw from the softmax of the logits."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

NOT_FINITE = -2
"""What is drawn where a logit is NaN or infinite. It is no token."""


class Choice(NamedTuple):
    """How a token is drawn from the logits."""

    temperature: float
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int
    """Draw among this many likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens whose probabilities, after the former two, add up to this; 1: all."""
    entries: int | None = None
    """Draw no id from this one on, because the tokenizer has none of them; None: draw any."""
    penalty: float = 1.0
    """Divides the logits of tokens that were seen, where they are positive, and multiplies them where they are not."""

    def __call__(
        self,
        key: Key[Array, ""],
        number: Int[Array, ""] | int,
        logits: Float[Array, "B V"],
        seen: Bool[Array, "B V"] | None = None,
    ) -> Int[Array, " B"]:
        """Draw a token for each row; the draw depends on `key`, the number of the token and the row alone.

        `seen` says which tokens are in the prompt or were drawn: those are made less likely by the penalty (Keskar et
        al. 2019, section 4.1; the sign as transformers has it). A row in which a logit is not finite gets `NOT_FINITE`.
        """
        entries = logits.shape[-1] if self.entries is None else self.entries
        known = (jnp.arange(logits.shape[-1]) < entries)[None]
        finite = jnp.all(jnp.isfinite(logits) | ~known, axis=-1)
        if seen is not None:
            lowered = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
            logits = jnp.where(seen, lowered, logits)
        drawn = self._drawn(key, number, jnp.where(known, logits, -jnp.inf))
        return jnp.where(finite, drawn, NOT_FINITE)

    def _drawn(
        self, key: Key[Array, ""], number: Int[Array, ""] | int, logits: Float[Array, "B V"]
    ) -> Int[Array, " B"]:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if 0 < self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        logits = logits / self.temperature
        if self.top_p < 1:
            logits = _nucleus(logits, self.top_p)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(logits)))
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _nucleus(logits: Float[Array, "B V"], share: float) -> Float[Array, "B V"]:
    """Hide all but the fewest likeliest tokens whose probabilities add up to `share` (Holtzman et al. 2020, eq. 2)."""
    order = jnp.argsort(-logits, axis=-1)
    sorted_p = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    # A token is kept where those before it do not suffice; so the first one always is.
    kept = jnp.cumsum(sorted_p, axis=-1) - sorted_p < share
    kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, logits, -jnp.inf)
