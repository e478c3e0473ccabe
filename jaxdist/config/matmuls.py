"""The weights of a layer that multiply tokens, each described once. No jax here.

Models make their parameters from these rows. Counts of parameters and FLOPs, low-rank adapters, the tables of Hugging
Face, and predictions of memory, traffic and time read them. A model that multiplies by other weights gets its rows
here, and its own way of using them in `models/`.

The letters of dims: D is the residual stream, N the query heads, K the heads of keys and values, G the query heads that
share one of them, H the size of a head, U that of a value where it is another, F the width of the MLP or of an expert,
E the experts, V the vocabulary, S the rows of a table of positions, and I is 1. In latent attention, A is what queries
are made of, Z what keys and values are made of, X that and the turned dims of a key, W the other dims of a key and a
value. C counts the weights that lie side by side in one array, so that one matmul serves all of them.
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
"""The norms of attention and of the MLP, by their paths in the parameters of a layer."""


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
    bias_forward_only: bool = False
    """Whether no gradient needs the bias, which only shifts what a layer adds to the residual stream at its end."""
    kept: bool = True
    """Whether the backward pass needs the result, so that remat dots keeps it."""
    chosen: int = 1
    """How many experts a token goes through, of a weight that each expert has."""
    whole: tuple[str | None, ...] = ()
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
    def bias_letters(self) -> str:
        """The letters of the dims of a bias: each expert has one of its own."""
        return EXPERTS + self.outputs if self.stacked else self.outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of one layer."""
        return self._shape(self.letters)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The shape of a bias of what the product makes."""
        return self._shape(self.bias_letters)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical axes of the array's dims."""
        return self.whole or self.axes_of(self.letters, self.parts)

    @property
    def bias_axes(self) -> tuple[str | None, ...]:
        """The logical axes of the bias's dims.

        On the residual stream it is one of the vectors that all devices add, those of all experts too.
        """
        letters = self.bias_letters
        if self.whole:
            return ("norm",)
        if STREAM in letters:
            return tuple("norm" if letter == STREAM else None for letter in letters)
        return self.axes_of(letters, self.parts)

    @property
    def split(self) -> str:
        """The logical axis along which the model axis splits it; empty where all devices have the whole of it."""
        if self.whole:
            return ""
        return next(SPLIT[letter] for letter in self.letters if letter in SPLIT)

    @property
    def is_column(self) -> bool:
        """Whether its columns are split; otherwise its rows are, and what it makes is added to the residual stream."""
        return STREAM not in self.outputs

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

    @property
    def idle(self) -> int:
        """The number of values, with those of a bias, in the experts that a token does not go through."""
        if not self.stacked:
            return 0
        of_expert = self.elements_of_expert + (self.out if self.bias else 0)
        return (self.sizes[EXPERTS] - self.chosen) * of_expert

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
        "I": 1,
        "A": config.q_latent,
        "Z": config.kv_latent,
        "X": config.kv_latent + config.rope_dim,
        "W": config.unturned_size + config.value_size,
        "U": config.value_size,
    }


# A search asks for the matmuls and the heads of a few models, thousands of times.
@lru_cache(maxsize=64)
def matmuls_of(config: ModelConfig) -> Mapping[str, Matmul]:
    """Return the weights of a layer that multiply tokens, by their paths, in the order in which a token meets them.

    `config` is that of a stack, whose layers have the same (`stacks_of`).
    """
    assert not config.traits.forms, "layers of several forms have several tables"
    attention = _latent_attention if config.kv_latent else _attention
    rows = [*attention(config), *(_experts(config) if config.traits.routed else _mlp(config))]
    return MappingProxyType({row.path: row for row in rows})


class HeadSizes(NamedTuple):
    """How many values a head has."""

    key: int
    """Of a query and of a key."""
    value: int
    """Of a value, and so of what a query finds."""


def head_sizes_of(config: ModelConfig) -> HeadSizes:
    """Return the sizes of heads that the weights of attention make."""
    return HeadSizes(config.head_size, config.value_size)


def columns_of(config: ModelConfig) -> dict[str, list[Matmul]]:
    """Return the weights of a layer with split columns, by the logical axis that splits them."""
    columns: dict[str, list[Matmul]] = {}
    for matmul in matmuls_of(config).values():
        if matmul.is_column and matmul.split:
            columns.setdefault(matmul.split, []).append(matmul)
    return columns


class Entering(NamedTuple):
    """How many values of a token all devices of a split need that only some have: they are gathered, or summed."""

    width: int
    """Of what enters the weights."""
    multiplying: list[list[Matmul]]
    """For each vector that enters, the weights that multiply it, whose gradients need it."""


def entering(config: ModelConfig, logical: str) -> Entering:
    """Return what enters the weights of a layer that are split along `logical`."""
    columns = columns_of(config)[logical]
    if logical == "heads" and config.kv_latent:
        into = sum(matmul.into for matmul in columns)
        return Entering(into + config.rope_dim, [[matmul] for matmul in columns])
    return Entering(config.embed, [columns])


def _attention(config: ModelConfig) -> Iterator[Matmul]:
    sizes = sizes_of(config)
    biased = config.traits.biased
    fused = (Part("q_proj", "NH"), Part("k_proj", "KH"), Part("v_proj", "KH"))
    letters = "DKCH" if config.traits.grouped else "DCNH"
    norm = NORM1 if normed_before(config) else ""
    yield Matmul("attention.qkv", letters, "D", fused, sizes, norm, bias=biased or config.qkv_bias)
    yield _out(config, "NHD", sizes)


def _latent_attention(config: ModelConfig) -> Iterator[Matmul]:
    """Yield the weights of latent attention (MLA; DeepSeek-V2, 2024, section 2.1).

    Nothing splits those that make what all heads share.
    """
    sizes = sizes_of(config)
    norm = NORM1 if normed_before(config) else ""
    shared = ("norm", None)
    if config.q_latent:
        q_down = (Part("q_a_proj", "A"),)
        yield Matmul("attention.q_down", "DA", "D", q_down, sizes, norm, whole=shared)
        q_up = (Part("q_b_proj", "NH"),)
        yield Matmul("attention.q_up", "ANH", "A", q_up, sizes, "attention.q_norm")
    else:
        yield Matmul("attention.q", "DNH", "D", (Part("q_proj", "NH"),), sizes, norm)
    kv_down = (Part("kv_a_proj_with_mqa", "X"),)
    yield Matmul("attention.kv_down", "DX", "D", kv_down, sizes, norm, whole=shared)
    kv_up = (Part("kv_b_proj", "NW"),)
    yield Matmul("attention.kv_up", "ZNW", "Z", kv_up, sizes, "attention.kv_norm")
    yield _out(config, "NUD", sizes)


def _out(config: ModelConfig, letters: str, sizes: Mapping[str, int]) -> Matmul:
    """Return the last weight of attention, whose result no gradient needs if nothing reads it but the stream."""
    out = (Part("o_proj", "D"),)
    biased = config.traits.biased
    needed = attention_enters_mlp(config) or normed_after(config)
    return Matmul(
        "attention.out",
        letters,
        letters.removesuffix(STREAM),
        out,
        sizes,
        bias=biased or config.out_bias,
        bias_forward_only=not needed,
        kept=needed,
        scale=_scale_onto_stream(config),
    )


def _mlp(config: ModelConfig) -> Iterator[Matmul]:
    sizes = sizes_of(config)
    biased = config.traits.biased or config.mlp_bias
    up = Part("up_proj", "F")
    norm = NORM2 if normed_before(config) else ""
    if config.traits.gated:
        yield Matmul("mlp.gate_up", "DCF", "D", (Part("gate_proj", "F"), up), sizes, norm, bias=biased)
    else:
        yield Matmul("mlp.up", "DF", "D", (up,), sizes, norm, bias=biased)
    yield _down(config, "mlp.down", "FD", sizes, biased)


def _experts(config: ModelConfig) -> Iterator[Matmul]:
    """Yield the router, the weights of the experts, and of the experts that all tokens share, if there are any.

    The router's scores are as few values as there are experts, and nothing splits them.
    """
    sizes = sizes_of(config)
    biased = config.mlp_bias
    whole: tuple[str | None, ...] = ("norm", "router")
    scores = (Part("gate", "E"),)
    norm = NORM2 if normed_before(config) else ""
    router = Matmul("mlp.router", "DE", "D", scores, sizes, norm, biased, adaptable=False, kept=False)
    yield replace(router, whole=whole, exact=True)
    gate_up = (Part("gate_proj", "F"), Part("up_proj", "F"))
    chosen = config.experts_per_token
    yield Matmul("mlp.gate_up", "EDCF", "D", gate_up, sizes, norm, biased, adaptable=False, chosen=chosen)
    down = _down(config, "mlp.down", "EFD", sizes, biased)
    # The weight of an expert has the bias in its gradient.
    yield replace(down, adaptable=False, chosen=chosen, bias_forward_only=False)
    if config.shared_experts:
        width = {**sizes, "F": config.shared_experts * config.expert_size}
        yield Matmul("mlp.shared_gate_up", "DCF", "D", gate_up, width, norm, adaptable=False)
        yield replace(_down(config, "mlp.shared_down", "FD", width), adaptable=False)
        if config.gates_shared:
            one = (Part("shared_expert_gate", "I"),)
            whole = ("norm", None)
            yield Matmul("mlp.shared_gate", "DI", "D", one, sizes, norm, adaptable=False, kept=False, whole=whole)


def _down(config: ModelConfig, path: str, letters: str, sizes: Mapping[str, int], biased: bool = False) -> Matmul:
    """Return the last weight of an MLP, whose result no gradient needs if no norm follows."""
    down = (Part("down_proj", "D"),)
    normed = normed_after(config)
    return Matmul(
        path,
        letters,
        "F",
        down,
        sizes,
        bias=biased,
        bias_forward_only=not normed,
        kept=normed,
        scale=_scale_onto_stream(config),
    )


def normed_before(config: ModelConfig) -> bool:
    """Return whether attention and MLP read the residual stream through a norm."""
    return config.norms != "after"


def normed_after(config: ModelConfig) -> bool:
    """Return whether what attention and MLP make goes through a norm before it is added to the residual stream."""
    return config.norms != "before"


def attention_enters_mlp(config: ModelConfig) -> bool:
    """Return whether the MLP reads what attention has added to the residual stream."""
    return config.residual == "sequential"


def _scale_onto_stream(config: ModelConfig) -> float:
    """Return the scale that keeps the variance of the residual stream: GPT-2, section 2.3.

    The papers of Llama do not say what theirs is.
    """
    return 0.02 / (2 * config.depth) ** 0.5
