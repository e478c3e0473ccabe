"""Arithmetic of a step and of a run. Model FLOPs leave recomputation out, hardware FLOPs count it.

Sources differ in two conventions: Narayanan 2021, Megatron-Turing and Alpa tell hardware FLOPs, a third more, others
model FLOPs; and a causal model needs one half of attention's products, which some count whole.
`planning.timing.flops_per_token` is jaxdist's own, of a `ModelConfig`.
"""

from __future__ import annotations

from tests.planning.theory import Number

DAY = 86_400


def gpt_step(B: Number, s: Number, L: Number, h: Number, V: Number, recompute: str | None = None) -> Number:
    """FLOPs of B rows, attention whole: 72 B s L h^2 (1 + s/6h + V/12Lh).

    `recompute` makes them hardware FLOPs. full repeats the forward pass of the layers, but not of the output table
    (Narayanan et al. 2021, equation 3). selective is Korthikanti et al. 2022, equation 8, as printed: attention's core
    twice over, s/3h, where its forward pass repeated alone would make it s/4.5h.
    """
    layer, core, table = 24 * h**2, 4 * s * h, 2 * h * V  # forward, for each token
    times = {None: (3, 3), "selective": (3, 6), "full": (4, 4)}[recompute]
    return 1.0 * B * s * (L * (times[0] * layer + times[1] * core) + 3 * table)  # more than an int64 holds


def token(matrices: Number, L: Number, q: Number, s: Number, causal: bool = True) -> Number:
    """Model FLOPs of one token: 6 for each parameter that multiplies it, and attention's two products of s x q a layer.

    `matrices` are those of all layers and the output table (Chowdhery et al. 2022, appendix B); whole attention is
    twice the causal half.
    """
    return 6 * matrices + (6 if causal else 12) * L * q * s


def run(N: Number, tokens: Number) -> Number:
    """6ND: model FLOPs of a whole run, attention left out (Kaplan et al. 2020, section 2.1)."""
    return 6.0 * N * tokens


def chinchilla(N: Number) -> Number:
    """Tokens that use the compute of a run best, by the rule of 20 a parameter (Hoffmann et al. 2022, table 3)."""
    return 20 * N


def days(work: Number, devices: Number, rate: Number) -> Number:
    """Of `work` FLOPs at `rate` FLOP/s a device, both counted by one convention.

    With full recomputation and 8ND for the work it is Narayanan et al. 2021, equation 4.
    """
    return work / (devices * rate) / DAY
