"""How an attention scores keys: the scale of its scores, their soft cap, and how far back a query sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class Scores:
    """What a query times a key is multiplied by, and which keys are hidden from a query, documents aside."""

    scale: float
    window: int = 0
    """A query sees itself and the window - 1 tokens before it; 0: all before it."""
    cap: float = 0.0
    """The size that no score reaches (`soft_capped`); 0: none."""
    values_in_keys: int = 0
    """How many of the first dims of a key are its value; 0: values are arrays of their own."""
    form: str = "auto"
    """The form of attention that is asked for: `model.attention`."""

    @classmethod
    def of(cls, head_size: int, window: int = 0) -> Scores:
        """Return the scores of Vaswani et al. 2017, eq. 1, for queries and keys of this size."""
        return cls(head_size**-0.5, window)

    def within(self, sequence: int) -> Scores:
        """Return the same for rows of `sequence` tokens, without a window that hides nothing of them."""
        return replace(self, window=effective_window(self.window, sequence))

    def values(self, k: Float[Array, "... H"], v: Float[Array, "... U"]) -> Float[Array, "... U"]:
        """Return the values of keys `k`, beside which `v` is kept."""
        return k[..., : self.values_in_keys] if self.values_in_keys else v

    def capped(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the scores, given the products of queries, times the scale, with keys."""
        return soft_capped(products, self.cap)

    def slope(self, scores: Float[Array, "..."]) -> Float[Array, "..."] | float:
        """Return by how much scores grow with the products of queries with keys."""
        return soft_cap_slope(scores, self.cap) * self.scale

    def seen(self, queries: Int[Array, "..."], keys: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Return whether queries at these positions see keys at those; the arrays are broadcast."""
        seen = keys <= queries
        if self.window:
            seen &= keys > queries - self.window
        return seen


def soft_capped(values: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Return cap tanh(values / cap), which lies between -cap and cap (Gemma 2, 2024, section 2); a cap of 0 is none."""
    return cap * jnp.tanh(values / cap) if cap else values


def soft_cap_slope(capped: Float[Array, "..."], cap: float) -> Float[Array, "..."] | float:
    """Return the derivative of `soft_capped` where it has these results; 0 where one is minus infinity, hidden."""
    if not cap:
        return 1.0
    return jnp.where(jnp.isfinite(capped), 1 - jnp.square(capped / cap), 0)


def effective_window(window: int, sequence: int) -> int:
    """Return the window, or 0 where it hides nothing from a row of `sequence` tokens."""
    return window if window < sequence else 0
