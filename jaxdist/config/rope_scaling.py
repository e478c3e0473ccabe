"""Scale rotary positions beyond the length that a model was first trained with: linear, llama3 and yarn. Pure data.

A scaling is written as one text, the kind and what differs from its defaults: `llama3,factor=8,original=8192`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

Kind = Literal["none", "linear", "llama3", "yarn"]
"""The kinds of scaling, named as in `config.json` of Hugging Face."""

NUMBERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original", "low", "high"),
    "yarn": ("factor", "original", "fast", "slow", "attention"),
}
"""The numbers that each kind has, by the names of `RopeScaling`."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies, and with yarn also the attention, are scaled for longer contexts."""

    kind: Kind = "none"
    factor: float = 1.0
    """How many times longer the context gets."""
    original: int = 0
    """Tokens (S) of the context that the model was first trained with; linear does not need them."""
    low: float = 1.0
    """llama3: frequencies that turn at most this often in `original` tokens are divided by `factor`."""
    high: float = 4.0
    """llama3: frequencies that turn at least this often in `original` tokens stay."""
    fast: float = 32.0
    """yarn (beta): frequencies that turn at least this often in `original` tokens stay."""
    slow: float = 1.0
    """yarn (alpha): frequencies that turn at most this often in `original` tokens are divided by `factor`."""
    attention: float = 0.0
    """yarn: factor of queries and of keys; 0: 0.1 ln(factor) + 1."""

    @property
    def attention_factor(self) -> float:
        """Factor of queries and of keys: its square is that of the logits of attention (Peng et al. 2023, eq. 22)."""
        if self.kind != "yarn":
            return 1.0
        return self.attention or 0.1 * math.log(self.factor) + 1

    def frequencies(self, theta: float, size: int) -> list[float]:
        """Return the H/2 angles by which one position turns the pairs of a head of even size H = `size`."""
        plain = [theta ** -(i / size) for i in range(0, size, 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        if self.kind == "yarn":
            return self._yarn(plain, theta, size)
        return plain

    def _llama3(self, frequency: float) -> float:
        """Return one frequency as Llama 3.1 scales it: slow ones are divided, fast ones stay, between them a mix."""
        turns = self.original * frequency / (2 * math.pi)
        kept = min(max((turns - self.low) / (self.high - self.low), 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / self.factor

    def _yarn(self, plain: list[float], theta: float, size: int) -> list[float]:
        """Return the frequencies of YaRN (Peng et al. 2023, section 3.2, "NTK-by-parts").

        The mix is linear in the number of the pair, between the pairs that turn `fast` and `slow` times.
        """

        def pair(turns: float) -> float:
            return size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(pair(self.fast)), 0)
        last = min(math.ceil(pair(self.slow)), size - 1)
        width = max(last - first, 0.001)
        scaled = []
        for number, frequency in enumerate(plain):
            divided = min(max((number - first) / width, 0.0), 1.0)
            scaled.append(divided * frequency / self.factor + (1 - divided) * frequency)
        return scaled

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        defaults = RopeScaling()
        numbers = [(name, getattr(self, name)) for name in NUMBERS[self.kind]]
        return ",".join(
            [self.kind, *(f"{name}={value:.17g}" for name, value in numbers if value != getattr(defaults, name))]
        )


def parse(text: str) -> RopeScaling:
    """Return the scaling that a text such as `llama3,factor=8,original=8192` means.

    Raises `ValueError` with the end of a sentence that begins with the name of the knob.
    """
    kind, *parts = text.split(",")
    if kind not in get_args(Kind):
        raise ValueError(f"must begin with {', '.join(get_args(Kind))}, such as llama3,factor=8,original=8192")
    values: dict[str, float] = {}
    for part in parts:
        name, _, number = part.partition("=")
        if name not in NUMBERS[kind]:
            takes = ", ".join(NUMBERS[kind]) or "no numbers"
            raise ValueError(f"has '{name}', which {kind} does not take; it takes {takes}")
        if name in values:
            raise ValueError(f"has {name} twice; keep one")
        values[name] = _number(name, number)
    types = {field.name: field.type for field in fields(RopeScaling)}
    if "original" in values and values["original"] % 1:
        raise ValueError(f"has original={values['original']:g}, which must be a whole number of tokens")
    scaling = RopeScaling(kind, **{n: int(v) if types[n] == "int" else v for n, v in values.items()})  # type: ignore[arg-type]
    problem = _problem(scaling)
    if problem:
        raise ValueError(problem)
    return scaling


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 2**31:
        raise ValueError(f"has {name}={text[:40]}, which must be a number between 0 and 2,147,483,648, without either")
    return value


def _problem(scaling: RopeScaling) -> str:
    """Return why the numbers of a scaling make no sense together, or an empty string."""
    if scaling.kind == "none":
        return ""
    if scaling.factor < 1:
        return f"has factor={scaling.factor:g}, which must be at least 1"
    if "original" in NUMBERS[scaling.kind] and not scaling.original:
        example = f"{scaling.kind},factor=8,original=8192"
        return f"needs original=TOKENS, the context that the model was first trained with, such as {example}"
    if scaling.kind == "llama3" and scaling.low >= scaling.high:
        return f"has low={scaling.low:g} and high={scaling.high:g}; low must be less than high"
    if scaling.kind == "yarn" and scaling.slow >= scaling.fast:
        return f"has slow={scaling.slow:g} and fast={scaling.fast:g}; slow must be less than fast"
    return ""
