"""The weights of a layer that multiply tokens, each described once. No jax here.

Models make their parameters from these rows. Counts of parameters and FLOPs, low-rank adapters, the tables of Hugging
Face, and predictions of memory, traffic and time read them. A model that multiplies by other weights gets its rows
here, and its own way of using them in `models/`.

The letters of dims: D is the residual stream, N the query heads, K the heads of keys and values, G the query heads that
share one of them, H the size of a head, U that of a value where it is another, F the width of the MLP or of an expert,
E the experts, V the vocabulary, and S the rows of a table of positions. C counts the weights that lie side by side in
one array, so that one matmul serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxdist.config.model import ModelConfig

STREAM = "D"
"""The letter of the residual stream."""

FUSED = "C"
"""The letter of the weights that lie side by side in one array."""

EXPERTS = "E"
"""The letter along which the weights of experts are stacked; each token sees a few of them."""

AXES = {"D": "embed", "N": "heads", "F": "mlp", "E": "experts"}
"""The logical axes of a weight's dims, but for K; those of other letters have no name."""

KV_AXES = ("kv_heads_of_queries", "kv_heads_alone", "kv_heads")
"""The logical axes of K, by how many of key and value stand in the dim behind it."""

SPLIT = {"N": "heads", "K": "heads", "F": "mlp"}
"""The logical axis that the model axis splits, by the letters that it may split."""


NORM1 = "norm1"
NORM2 = "norm2"
"""The norms before attention and before the MLP, by their paths in the parameters of a layer."""


@dataclass(frozen=True)
class Part:
    """One of the weights that lie side by side in an array, or the only one."""

    name: str
    """As PEFT and most decoders of Hugging Face call it, such as `q_proj`."""
    outputs: str
    """The letters of what it makes of a token: "NH" is a vector of size H for each query head."""


@dataclass(frozen=True)
class Matmul:
    """A weight of a layer, or of each of its experts, and what it makes of a token."""

    path: str
    """Its path in the parameters of a layer, such as `attention.qkv`."""
    letters: str
    """The letters of its dims."""
    inputs: str
    """The letters that the product contracts."""
    parts: tuple[Part, ...]
    sizes: Mapping[str, int] = field(repr=False)
    """The size of each letter."""
    norm: str = ""
    """The norm of a layer whose result enters it; empty where rows are split."""
    bias: bool = False
    """Whether a bias is added to what it makes."""
    adaptable: bool = True
    """Whether its parts can have low-rank adapters."""
    kept: bool = True
    """Whether the backward pass needs the result, so that remat dots keeps it."""
    chosen: int = 1
    """How many experts a token goes through, of a weight that each expert has."""
    whole: tuple[str, ...] = ()
    """Logical axes that no mesh axis splits, in the place of those that the letters have."""
    exact: bool = False
    """Whether it is f32 at least in any compute dtype."""
    scale: float = 0.02
    """The standard deviation of its first values."""

    @property
    def stacked(self) -> bool:
        """Whether each expert has a weight of its own."""
        return self.letters.startswith(EXPERTS)

    @property
    def outputs(self) -> str:
        """The letters of the dims that the product makes."""
        made = self.letters.removeprefix(EXPERTS) if self.stacked else self.letters
        return "".join(letter for letter in made if letter not in self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of one layer."""
        return self._shape(self.letters)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The shape of a bias of what the product makes."""
        return self._shape(self.outputs)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical axes of the array's dims."""
        return self.whole or self.axes_of(self.letters, self.parts)

    @property
    def bias_axes(self) -> tuple[str | None, ...]:
        """The logical axes of the bias's dims: on the residual stream it is one of the vectors that all devices add."""
        axes = self.axes_of(self.outputs, self.parts)
        return tuple("norm" if letter == STREAM else axis for letter, axis in zip(self.outputs, axes, strict=True))

    @property
    def split(self) -> str:
        """The logical axis along which the model axis splits it; empty where all devices have the whole of it."""
        if self.whole:
            return ""
        return next(SPLIT[letter] for letter in self.letters if letter in SPLIT)

    @property
    def is_column(self) -> bool:
        """Whether the residual stream enters it, so that its columns are split; otherwise its rows are."""
        return self.inputs == STREAM

    @property
    def dims(self) -> str:
        """The einsum string of its product with tokens, such as "BSD,DF->BSF"."""
        sequence = "S" if self.is_column else "s"
        return f"BS{self.inputs},{self.letters}->B{sequence}{self.outputs}"

    @property
    def into(self) -> int:
        """How many values of a token the product contracts."""
        return self.size(self.inputs)

    @property
    def out(self) -> int:
        """How many values it makes of a token."""
        return sum(self.size(part.outputs) for part in self.parts)

    @property
    def elements(self) -> int:
        """The number of its values, in one layer."""
        experts = self.sizes[EXPERTS] if self.stacked else 1
        return experts * self.elements_of_expert

    @property
    def elements_of_expert(self) -> int:
        """The number of its values, in one expert if each of them has such a weight."""
        return self.into * self.out

    @property
    def elements_of_token(self) -> int:
        """The number of its values that multiply one token."""
        return self.elements_of_expert * self.chosen

    def axes_of(self, letters: str, parts: Sequence[Part]) -> tuple[str | None, ...]:
        """Return the logical axes of dims, in an array that has these parts of the weight."""
        axes = AXES | {"K": KV_AXES[sum("K" in part.outputs for part in parts)]}
        return tuple(axes.get(letter) for letter in letters)

    def size(self, letters: str) -> int:
        """Return how many values these letters count."""
        return math.prod(self.sizes[letter] for letter in letters)

    def places(self, part: Part) -> int:
        """Return how many places along C a part has: queries have one for each head that shares a key and a value."""
        return self.size(part.outputs) // self.size(self.outputs.replace(FUSED, ""))

    def _shape(self, letters: str) -> tuple[int, ...]:
        places = sum(self.places(part) for part in self.parts) if FUSED in letters else 1
        return tuple(places if letter == FUSED else self.sizes[letter] for letter in letters)


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """Return the size of each letter."""
    return {
        "L": config.layers,
        "D": config.embed,
        "N": config.heads,
        "K": config.key_value_heads,
        "G": config.heads // config.key_value_heads,
        "H": config.head_size,
        "F": config.split_width,
        "E": config.experts,
        "V": config.vocab,
        "S": config.position_rows,
    }


# A search asks for the matmuls and the heads of a few models, thousands of times.
@lru_cache(maxsize=64)
def matmuls_of(config: ModelConfig) -> Mapping[str, Matmul]:
    """Return the weights of a layer that multiply tokens, by their paths, in the order in which a token meets them.

    `config` is that of a stack, whose layers have the same (`stacks_of`).
    """
    assert not config.traits.forms, "layers of several forms have several tables"
    rows = [*_attention(config), *(_experts(config) if config.traits.routed else _mlp(config))]
    return MappingProxyType({row.path: row for row in rows})


class HeadSizes(NamedTuple):
    """How many values a head has."""

    key: int
    """Of a query and of a key."""
    value: int
    """Of a value, and so of what a query finds."""


@lru_cache(maxsize=64)
def head_sizes_of(config: ModelConfig) -> HeadSizes:
    """Return the sizes of heads that the weights of attention make."""
    sizes = {}
    for matmul in _attention(config):
        for part in matmul.parts:
            sizes[part.name] = matmul.size(part.outputs.replace("K", ""))
    return HeadSizes(sizes["k_proj"], sizes["v_proj"])


def columns_of(config: ModelConfig) -> dict[str, list[Matmul]]:
    """Return the weights of a layer that the residual stream enters, by the logical axis that splits their columns."""
    columns: dict[str, list[Matmul]] = {}
    for matmul in matmuls_of(config).values():
        if matmul.is_column and matmul.split:
            columns.setdefault(matmul.split, []).append(matmul)
    return columns


def _attention(config: ModelConfig) -> Iterator[Matmul]:
    sizes = sizes_of(config)
    biased = config.traits.biased
    fused = (Part("q_proj", "NH"), Part("k_proj", "KH"), Part("v_proj", "KH"))
    letters = "DKCH" if config.traits.grouped else "DCNH"
    yield Matmul("attention.qkv", letters, "D", fused, sizes, NORM1, bias=biased or config.qkv_bias)
    out = (Part("o_proj", "D"),)
    yield Matmul("attention.out", "NHD", "NH", out, sizes, bias=biased, scale=_scale_onto_stream(config))


def _mlp(config: ModelConfig) -> Iterator[Matmul]:
    sizes = sizes_of(config)
    biased = config.traits.biased
    up = Part("up_proj", "F")
    if config.traits.gated:
        yield Matmul("mlp.gate_up", "DCF", "D", (Part("gate_proj", "F"), up), sizes, NORM2, bias=biased)
    else:
        yield Matmul("mlp.up", "DF", "D", (up,), sizes, NORM2, bias=biased)
    yield _down(config, "mlp.down", "FD", sizes)


def _experts(config: ModelConfig) -> Iterator[Matmul]:
    """Yield the router, the weights of the experts, and of the experts that all tokens share, if there are any.

    The router's scores are as few values as there are experts, and nothing splits them.
    """
    sizes = sizes_of(config)
    whole = ("norm", "router")
    scores = (Part("gate", "E"),)
    yield Matmul("mlp.router", "DE", "D", scores, sizes, NORM2, adaptable=False, kept=False, whole=whole, exact=True)
    gate_up = (Part("gate_proj", "F"), Part("up_proj", "F"))
    chosen = config.experts_per_token
    yield Matmul("mlp.gate_up", "EDCF", "D", gate_up, sizes, NORM2, adaptable=False, chosen=chosen)
    yield replace(_down(config, "mlp.down", "EFD", sizes), adaptable=False, chosen=chosen)
    if config.shared_experts:
        width = {**sizes, "F": config.shared_experts * config.expert_size}
        yield Matmul("mlp.shared_gate_up", "DCF", "D", gate_up, width, NORM2, adaptable=False)
        yield replace(_down(config, "mlp.shared_down", "FD", width), adaptable=False)


def _down(config: ModelConfig, path: str, letters: str, sizes: Mapping[str, int]) -> Matmul:
    """Return the last weight of an MLP, whose result no gradient needs."""
    down = (Part("down_proj", "D"),)
    biased = config.traits.biased
    return Matmul(path, letters, "F", down, sizes, bias=biased, kept=False, scale=_scale_onto_stream(config))


def _scale_onto_stream(config: ModelConfig) -> float:
    """Return the scale that keeps the variance of the residual stream: GPT-2, section 2.3.

    The papers of Llama do not say what theirs is.
    """
    return 0.02 / (2 * config.depth) ** 0.5
