"""How many parameters a transformer has, and how many of them multiply a token."""

from __future__ import annotations

from tests.planning.theory import Number


def gpt_layer(h: Number) -> Number:
    """Matrices of 12h^2, biases and two norms of 13h (Narayanan et al. 2021, equation 2)."""
    return 12 * h**2 + 13 * h


def gpt(L: Number, h: Number, V: Number, s: Number) -> Number:
    """A GPT with one table for both ends and learned positions; equation 2 leaves out the last norm's 2h."""
    return L * gpt_layer(h) + (V + s) * h + 2 * h


def matrices(h: Number, f: Number, q: Number, kv: Number, gated: bool = True) -> Number:
    """Those of a layer: query and output, key and value, and the MLP's two, or three if it is gated.

    Of a mixture of experts, f is the widths of those that one token goes to, added up; its router is left out.
    """
    return 2 * h * q + 2 * h * kv + (3 if gated else 2) * h * f


def llama(L: Number, h: Number, f: Number, kv: Number, V: Number, tied: bool = False) -> Number:
    """Its layers with two norms each, the last norm, and one table or two (Touvron et al. 2023, section 2.2)."""
    return L * (matrices(h, f, h, kv) + 2 * h) + (1 if tied else 2) * V * h + h


def fullest_stage(layer: Number, table: Number, L: Number, p: Number, t: Number = 1, tied: bool = False) -> Number:
    """Parameters of the first or last rank of a pipeline; a single rank has both tables, if there are two."""
    tables = (p == 1) * (0 if tied else 1) + 1
    return (layer * L / p + table * tables) / t
