"""Scale rotary positions beyond the length that a model was first trained with. Pure data.

The kinds are linear, llama3, yarn and longrope. A scaling is written as one text, the kind and what differs from its
defaults: `llama3,factor=8,original=8192`. A list of numbers has colons: `short=1:1.05:1.2`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["none", "linear", "llama3", "yarn", "longrope"]
"""The kinds of scaling, named as in `config.json` of Hugging Face."""

NUMBERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original", "low", "high"),
    "yarn": ("factor", "original", "fast", "slow", "attention", "mscale", "mscale_all", "truncate"),
    "longrope": ("factor", "original", "attention", "short", "long"),
}
"""The numbers that each kind has, by the names of `RopeScaling`."""

LISTS = ("short", "long")
"""Those that are lists."""

TRUTHS = {"yes": True, "no": False}
"""The values of one that is true or false."""


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
    """yarn, longrope: factor of queries and of keys; 0: the one that `attention_factor` gives."""
    mscale: float = 0.0
    """yarn (DeepSeek): with `mscale_all`, a number in the place of 1 in the factor of the dims that are turned."""
    mscale_all: float = 0.0
    """yarn (DeepSeek): the same in the factor of all dims of a query and of a key; 0: all have the same factor."""
    truncate: bool = True
    """yarn: whether the pairs between which frequencies are mixed are whole numbers."""
    short: tuple[float, ...] = ()
    """longrope: what each of the H/2 frequencies is divided by, in rows of at most `original` tokens."""
    long: tuple[float, ...] = ()
    """longrope: the same in longer rows."""

    @property
    def attention_factor(self) -> float:
        """Factor of queries and of keys: its square is that of the logits of attention.

        The formulas are those of YaRN (Peng et al. 2023, eq. 22) and LongRoPE (Ding et al. 2024; Phi-3's code).
        """
        if self.kind == "yarn" and self.mscale and self.mscale_all:
            return self.attention or self._yarn_factor(self.mscale) / self._yarn_factor(self.mscale_all)
        if self.kind == "yarn":
            return self.attention or self._yarn_factor(1.0)
        if self.kind == "longrope":
            return self.attention or math.sqrt(1 + math.log(self.factor) / math.log(self.original))
        return 1.0

    @property
    def score_factor(self) -> float:
        """Factor of all logits of latent attention, beside `attention_factor` (DeepSeek-V2's code)."""
        return self._yarn_factor(self.mscale_all) ** 2 if self.mscale_all else 1.0

    def _yarn_factor(self, times: float) -> float:
        """Return the factor of YaRN with its logarithm `times` as large."""
        return 0.1 * times * math.log(self.factor) + 1

    def is_long(self, sequence: int) -> bool:
        """Return whether rows of so many tokens get the factors of longrope for long ones."""
        return self.kind == "longrope" and sequence > self.original

    def frequencies(self, theta: float, size: int, sequence: int = 0) -> list[float]:
        """Return the H/2 angles by which one position turns the pairs of a head of even size H = `size`.

        With longrope they depend on how many tokens rows have, `sequence`.
        """
        plain = [theta ** -(i / size) for i in range(0, size, 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        if self.kind == "yarn":
            return self._yarn(plain, theta, size)
        if self.kind == "longrope":
            divisors = self.long if self.is_long(sequence) else self.short
            return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)]
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

        first, last = pair(self.fast), pair(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
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
            [self.kind, *(f"{name}={_written(value)}" for name, value in numbers if value != getattr(defaults, name))]
        )


def _written(value: float | tuple[float, ...]) -> str:
    """Return the text of a number, of a list, or of what is true or false."""
    if isinstance(value, bool):
        return next(text for text, truth in TRUTHS.items() if truth == value)
    return ":".join(f"{number:.17g}" for number in (value if isinstance(value, tuple) else (value,)))


def parse(text: str) -> RopeScaling:
    """Return the scaling that a text such as `llama3,factor=8,original=8192` means.

    Raises `ValueError` with the end of a sentence that begins with the name of the knob.
    """
    kind, *parts = text.split(",")
    if kind not in get_args(Kind):
        raise ValueError(f"must begin with {', '.join(get_args(Kind))}, such as llama3,factor=8,original=8192")
    values: dict[str, float | tuple[float, ...]] = {}
    for part in parts:
        name, _, number = part.partition("=")
        if name not in NUMBERS[kind]:
            takes = ", ".join(NUMBERS[kind]) or "no numbers"
            raise ValueError(f"has '{name}', which {kind} does not take; it takes {takes}")
        if name in values:
            raise ValueError(f"has {name} twice; keep one")
        values[name] = _value(name, number)
    scaling = RopeScaling(kind, **values)  # type: ignore[arg-type]
    problem = _problem(scaling)
    if problem:
        raise ValueError(problem)
    return scaling


def _value(name: str, text: str) -> float | tuple[float, ...]:
    """Return the value of a number, of a list, or of what is true or false."""
    if name == "truncate":
        if text not in TRUTHS:
            raise ValueError(f"has truncate={text[:40]}, which must be {' or '.join(TRUTHS)}")
        return TRUTHS[text]
    if name in LISTS:
        return tuple(_number(name, part) for part in text.split(":"))
    number = _number(name, text)
    if name != "original":
        return number
    if number % 1:
        raise ValueError(f"has original={number:g}, which must be a whole number of tokens")
    return int(number)


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
    if scaling.kind == "longrope":
        return _wrong_lists(scaling)
    if scaling.kind == "llama3" and scaling.low >= scaling.high:
        return f"has low={scaling.low:g} and high={scaling.high:g}; low must be less than high"
    if scaling.kind == "yarn" and scaling.slow >= scaling.fast:
        return f"has slow={scaling.slow:g} and fast={scaling.fast:g}; slow must be less than fast"
    return ""


def _wrong_lists(scaling: RopeScaling) -> str:
    """Return why the lists of longrope make no sense together, or an empty string."""
    if scaling.original < 2:
        return f"has original={scaling.original}, which must be at least 2"
    if not scaling.short or len(scaling.short) != len(scaling.long):
        return (
            f"has {len(scaling.short)} numbers in short and {len(scaling.long)} in long; give each a number for "
            "each pair of a head, such as short=1:1,long=2:4"
        )
    return ""
