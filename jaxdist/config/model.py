"""Define the knobs of the model, and what requests and predictions must know of its family. Pure data: no jax."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from jaxdist.config import periods, rope_scaling
from jaxdist.config.lora_targets import LoraTargets
from jaxdist.config.quantized import BESIDE, FORMS
from jaxdist.config.rope_scaling import RopeScaling
from jaxdist.config.values import (
    Channels,
    Count,
    CountOrZero,
    FractionFloat32,
    Layers,
    NonNegativeFloat32,
    PeriodText,
    Pixels,
    PositiveFloat32,
    RopeScalingText,
    Section,
    Sequence,
)


class Kind(NamedTuple):
    """What differs between the layers of a stack beside the numbers in their weights, whose shapes are the same."""

    window: int
    """A token sees itself and at most window - 1 tokens before it; 0: all before it."""
    theta: float = 0.0
    """The base of its rotary positions; 0: its queries and keys are not turned."""
    scaling: str = "none"
    """The scaling of its rotary positions, as `rope_scaling.parse` reads it."""


class Traits(NamedTuple):
    """What requests and predictions must know of a model family; the model itself is a file in `models/`."""

    text: bool
    """Whether it is a decoder of text; otherwise it classifies images."""
    rotary: bool = False
    """Whether positions are rotary (RoPE), without parameters; otherwise a decoder has a table of learned positions."""
    grouped: bool = False
    """Whether several query heads may share a key/value head (GQA)."""
    gated: bool = False
    """Whether the MLP has a third matrix, the gate."""
    dropout: bool = False
    """Whether it has dropout."""
    biased: bool = False
    """Whether each of its matmuls adds a bias."""
    activation: str = "gelu"
    """What an MLP applies to its hidden layer, or to its gate: a value of `model.activation` other than auto."""
    norm_offset: float = 0.0
    """What is added to the scale of each RMS norm; the scale itself begins at 1 minus this."""
    scaled_embedding: bool = False
    """Whether the vectors of tokens are multiplied by the root of their width."""
    routed: bool = False
    """Whether each MLP is a mixture of experts, of which a router chooses some for each token."""
    period: tuple[str, ...] = ("sliding",)
    """The kinds of its layers, of `periods.KINDS`, which repeat in this order; the last period may be cut short."""
    forms: tuple[tuple[str, int], ...] = ()
    """The forms of its layers, first to last, where they have different parameters (`stacks.FORMS`), each with how many
    layers have it; the last has all that are left."""


FAMILIES = {
    "gpt": Traits(text=True, dropout=True, biased=True),
    "llama": Traits(text=True, rotary=True, grouped=True, gated=True, activation="silu"),
    "gemma": Traits(
        text=True,
        rotary=True,
        grouped=True,
        gated=True,
        activation="gelu",
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "moe": Traits(text=True, rotary=True, grouped=True, gated=True, activation="silu", routed=True),
    "cnn": Traits(text=False, dropout=True),
    "resnet18": Traits(text=False),
    "resnet50": Traits(text=False),
}
"""The model families by the names that `model.family` accepts."""

EXPERT_SIZES = ("experts", "expert_mlp", "shared_experts", "shared_gate", "dense_layers")
"""The knobs that make the number of parameters of experts."""

GROUPS = ("router_groups", "router_groups_kept")
"""The knobs that say how many groups of experts there are, and how many of them a token may choose from."""

ROUTING = (
    *("experts_per_token", "router", "router_renormalize", "router_scale", "capacity_factor"),
    *("router_group_score", *GROUPS),
)
"""The knobs that decide which experts a token goes through, and when."""

BALANCE = ("balance_rate", "balance_loss", "z_loss")
"""The knobs that keep the load of experts even."""

LATENT = ("q_latent", "kv_latent", "rope_dim", "value_dim")
"""The knobs that make the number of parameters of latent attention."""

OF_LATENT = ("q_latent", "rope_dim", "value_dim", "rope_pairs")
"""The knobs that latent attention alone uses."""

OF_ROTARY = (
    "head_dim",
    "kv_heads",
    "kv_latent",
    *OF_LATENT,
    "rope_theta",
    "rope_scaling",
    "rotary_fraction",
    "period",
    "sliding_theta",
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "qk_norm",
    "norm",
    "norms",
    "residual",
    "activation",
    "gate",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_divisor",
    "attention_cap",
    "sinks",
    "logit_cap",
)
"""The knobs that only families with rotary positions use: what their layers differ in."""

PARTS = {"dropout": ("dropout", ("dropout",)), "routed": ("experts", (*EXPERT_SIZES, *ROUTING, *BALANCE))}
"""Trait of a family -> (the part that its models have, the knobs that no other family uses)."""

SIZES = (
    *("layers", "embed", "heads", "head_dim", "kv_heads", *LATENT),
    *("mlp", "vocab", "sequence", "positions", *EXPERT_SIZES),
)
"""The knobs that make the number of parameters of a decoder."""


class ModelConfig(Section):
    """Model family (a text decoder or an image classifier) and its sizes."""

    family: Literal["gpt", "llama", "gemma", "moe", "cnn", "resnet18", "resnet50"] = "gpt"
    """Text: gpt (GPT-2), llama, gemma, or moe (llama with experts). Images: cnn (convolutional) or a ResNet."""
    layers: Layers = 4
    """Decoder blocks (L)."""
    embed: Count = 128
    """Width of the residual stream (D)."""
    heads: Count = 4
    """Attention heads (N); must divide embed, if head_dim is 0."""
    head_dim: CountOrZero = 0
    """Size of llama's heads (H); 0: embed / heads."""
    kv_heads: CountOrZero = 0
    """Key/value heads (K) of llama's grouped-query attention (GQA); must divide heads; 0: as many as heads."""
    kv_latent: CountOrZero = 0
    """Width of what keys and values of all heads are made of in latent attention (MLA, DeepSeek); 0: no such one."""
    q_latent: CountOrZero = 0
    """With kv_latent, the width of what queries of all heads are made of; 0: that of the residual stream."""
    rope_dim: CountOrZero = 0
    """With kv_latent, the dims that RoPE turns, behind head_dim others; of a key, all heads share them."""
    value_dim: CountOrZero = 0
    """With kv_latent, the size of a value; 0: head_dim."""
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    """With kv_latent, which dims RoPE turns together: i and i + rope_dim / 2, or 2i and 2i + 1."""
    rope_theta: Annotated[PositiveFloat32, Field(ge=1)] = 500_000.0
    """Base of llama's rotary position embeddings (RoPE)."""
    rope_scaling: RopeScalingText = "none"
    """RoPE for longer contexts: none, or linear, llama3, yarn or longrope, such as llama3,factor=8,original=8192."""
    rotary_fraction: Annotated[PositiveFloat32, Field(le=1)] = 1.0
    """Fraction of llama's heads, their first dims, that RoPE turns."""
    period: PeriodText = ""
    """Kinds of llama's layers in turn, such as sliding,sliding,full,full-nope (without RoPE); empty: all sliding."""
    sliding_theta: NonNegativeFloat32 = 0.0
    """RoPE's base in the sliding layers of period, without rope_scaling there; 0: as in the others."""
    qkv_bias: bool = False
    """Add a bias to llama's queries, keys and values, as Qwen 2 does; gpt always has it."""
    out_bias: bool = False
    """Add a bias to what llama's attention adds to the residual stream, as GPT-NeoX does."""
    mlp_bias: bool = False
    """Add biases in llama's MLP, or in experts and their router; gpt always has them."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMS norm of llama's queries and keys before RoPE: of each head (Qwen 3), or of all heads together (OLMo)."""
    norm: Literal["auto", "rms", "layer"] = "auto"
    """Norms of llama: rms, or layer (LayerNorm with a bias, GPT-NeoX); auto: as the family has it."""
    norms: Literal["before", "after", "both"] = "before"
    """Where llama's norms are: before attention and MLP, after them (OLMo 2), or before and after (Gemma 2)."""
    residual: Literal["sequential", "parallel"] = "sequential"
    """parallel: llama's attention and MLP both read the layer's input, and their results are added (GPT-NeoX)."""
    norm_eps: PositiveFloat32 = 1e-5
    """Added to the variance or mean square in every norm."""
    mlp: CountOrZero = 0
    """Width of the MLP (F); 0: 4 x embed, or for llama and moe 8/3 x embed rounded up to a multiple of 256."""
    activation: Literal["auto", "silu", "gelu", "gelu-erf", "xielu", "clamped-swiglu"] = "auto"
    """Activation of llama's MLP: gelu is the tanh form; xielu learns two numbers; clamped-swiglu is gpt-oss's."""
    gate: Literal["auto", "on", "off"] = "auto"
    """Whether llama's MLP has a third matrix, the gate; auto: as the family has it."""
    embedding_multiplier: PositiveFloat32 = 1.0
    """Factor of the vectors of tokens (Granite)."""
    residual_multiplier: PositiveFloat32 = 1.0
    """Factor of what attention and MLP add to the residual stream (Granite)."""
    attention_multiplier: NonNegativeFloat32 = 0.0
    """Factor of a query times a key; 0: 1 / the square root of the head's size."""
    logits_divisor: PositiveFloat32 = 1.0
    """What logits are divided by (Granite's logits_scaling)."""
    experts: Count = 8
    """Experts in each layer of moe (E)."""
    experts_per_token: Count = 2
    """Experts that the router chooses for each token (k)."""
    expert_mlp: CountOrZero = 0
    """Width of each expert; 0: mlp."""
    shared_experts: CountOrZero = 0
    """Experts that every token goes through, beside the chosen ones: one MLP of shared_experts x expert_mlp."""
    shared_gate: bool = False
    """Multiply what shared_experts make by the sigmoid of a product with the token (Qwen 2 MoE)."""
    dense_layers: CountOrZero = 0
    """First layers of moe with an MLP of width mlp in the place of experts (DeepSeek)."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts: softmax over all of them, or the sigmoid of each (DeepSeek-V3)."""
    router_renormalize: bool = True
    """Divide the scores of a token's chosen experts by their sum, as Mixtral does and OLMoE does not."""
    router_scale: PositiveFloat32 = 1.0
    """Factor of the chosen experts' scores, after they are renormalized."""
    router_group_score: Literal["none", "best", "best-two"] = "none"
    """Choose within some groups of experts, by the best score in each (DeepSeek-V2), or the two best added (V3)."""
    router_groups: Count = 1
    """Groups of experts in a row, all equally many; must divide experts."""
    router_groups_kept: Count = 1
    """Groups whose experts a token may choose."""
    balance_rate: NonNegativeFloat32 = 1e-3
    """Step of the balance, a bias of each expert that steers the choice alone, by the sign of its load; 0: none."""
    balance_loss: NonNegativeFloat32 = 0.0
    """Factor of the load-balancing loss, which each row has of its own; 0: none."""
    z_loss: NonNegativeFloat32 = 0.0
    """Factor of the router's z-loss, the square of the logarithm of the sum of exponentials; 0: none."""
    capacity_factor: Annotated[float, Field(gt=0, le=64)] = 1.25
    """Room of the first round of dispatch, in even shares of the tokens; no token is dropped, more rounds follow."""
    vocab: Count = 2048
    """Vocabulary size: rows of the embedding table (V). A tokenizer trained on the data gets this size."""
    sequence: Sequence = 128
    """Tokens per row (S)."""
    positions: CountOrZero = 0
    """Rows of gpt's table of learned positions; 0: as many as sequence."""
    window: CountOrZero = 0
    """Sliding window of attention: a token sees itself and at most window - 1 tokens before it; 0: all before it."""
    attention_cap: NonNegativeFloat32 = 0.0
    """Soft cap of llama's scores of attention, cap tanh(score / cap), as Gemma 2 has it; 0: none."""
    sinks: bool = False
    """Learn a logit of each of llama's heads that takes a share of its softmax (attention sinks), as gpt-oss has it."""
    logit_cap: NonNegativeFloat32 = 0.0
    """Soft cap of llama's logits, in the same way; 0: none."""
    documents: Literal["joined", "apart"] = "joined"
    """joined: tokens attend to earlier documents of their row; apart: they do not, and positions restart in each."""
    tied: bool = True
    """Use the embedding table as the output projection too (weight tying)."""
    dropout: FractionFloat32 = 0.0
    """Dropout probability: for gpt in each block and after the embedding, for cnn before the head."""
    lora_rank: CountOrZero = 0
    """Rank of low-rank adapters (LoRA): they alone are trained, beside the frozen weights of init_from; 0: none."""
    lora_alpha: NonNegativeFloat32 = 0.0
    """What adapters add is multiplied by lora_alpha / lora_rank; 0: twice the rank."""
    lora_dropout: FractionFloat32 = 0.0
    """Dropout probability of what goes into an adapter."""
    lora_targets: LoraTargets = ""
    """Weights with an adapter, such as q_proj,v_proj; empty: all that the family has, but no experts."""
    lora_base: Literal["float32", "bfloat16", "int8", "nf4"] = "float32"
    """How the frozen weights are held; int8 and nf4 (QLoRA): the matrices of layers in 8 or 4 bits, others bfloat16."""
    remat: Literal["none", "dots", "block", "stage", "offload"] = "none"
    """Activation checkpointing: none (cheap), dots (all but matmuls), block, stage; offload: block, inputs on host."""
    unroll_layers: bool = False
    """Write the layers out in the program, in place of a loop, which copies what it keeps; compiling takes longer."""
    attention: Literal["auto", "cudnn", "blocks"] = "auto"
    """Form of attention: cudnn (GPUs), or blocks of queries (any device); auto: cudnn where it can run."""

    classes: Annotated[int, Field(ge=2, lt=2**31)] = 10
    """Number of image classes."""
    image: Pixels = 8
    """Height and width of an image in pixels; images of a folder are scaled to it."""
    channels: Channels = 1
    """Channels of an image: 1 for greyscale, 3 for colour."""

    @property
    def traits(self) -> Traits:
        """The traits of the family, with what knobs say in the place of some."""
        return _with_knobs(FAMILIES[self.family], self.activation, self.gate, self.period, self.dense_layers)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of the layers of one period: layer i is of kind `kinds[i % len(kinds)]`."""
        return tuple(self._kind(*periods.parts_of(name)) for name in self.traits.period)

    def _kind(self, slides: bool, turns: bool) -> Kind:
        """Return the kind of a layer that has the window or not, and rotary positions or not."""
        window = self.window if slides else 0
        if not (turns and self.traits.rotary):
            return Kind(window)
        if slides and self.sliding_theta:
            return Kind(window, self.sliding_theta)
        return Kind(window, self.rope_theta, self.rope_scaling)

    @property
    def depth(self) -> int:
        """The layers that the residual stream goes through."""
        return self.layers

    @property
    def periods(self) -> int:
        """How many periods of `kinds` the layers make, with the last one, which may be cut short."""
        return -(-self.layers // len(self.kinds))

    @property
    def shares_of_kinds(self) -> dict[Kind, float]:
        """The kinds of layers, with the share of the layers that are of each."""
        kinds = self.kinds
        number = Counter(kinds[i % len(kinds)] for i in range(self.layers))
        return {kind: count / self.layers for kind, count in number.items()}

    @property
    def images(self) -> bool:
        """Whether the model classifies images; otherwise it models text."""
        return not self.traits.text

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights stay as they are: only what stands beside them is trained."""
        return self.lora_rank > 0

    @property
    def frozen_by(self) -> str:
        """The knob that freezes the model's own weights, with its value."""
        return f"model.lora_rank {self.lora_rank}"

    @property
    def dtype_at_rest(self) -> str:
        """The dtype of the model's own weights between steps; beside matrices in a stored form, that of the others."""
        if not self.frozen:
            return "float32"
        return BESIDE if self.stored_form else self.lora_base

    @property
    def stored_form(self) -> str:
        """The form in which frozen matrices of layers are held, of `quantized.FORMS`; empty where they have a dtype."""
        return self.lora_base if self.frozen and self.lora_base in FORMS else ""

    @property
    def drops(self) -> bool:
        """Whether a step of training draws masks of dropout."""
        return self.dropout > 0 or self.lora_dropout > 0

    @property
    def all_rows_at_once(self) -> bool:
        """Whether the loss sees all rows of a micro-batch at once, so that the compiler reduces gradients.

        It does in an image classifier with dropout, whose masks would else differ from device to device.
        """
        return self.images and self.dropout > 0

    @property
    def documents_apart(self) -> bool:
        """Whether tokens attend within their own document alone, so that batches tell where documents start."""
        return self.documents == "apart"

    @property
    def key_value_heads(self) -> int:
        """Key/value heads (K), with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Size of a query and of a key (H), with the default filled in."""
        return self.unturned_size + (self.rope_dim if self.kv_latent else 0)

    @property
    def unturned_size(self) -> int:
        """`head_dim` with the default filled in: in latent attention, the dims of a query that RoPE does not turn."""
        return self.head_dim or self.embed // self.heads

    @property
    def value_size(self) -> int:
        """Size of a value (U), with the default filled in."""
        if not self.kv_latent:
            return self.head_size
        return self.value_dim or self.unturned_size

    @property
    def embedding_scale(self) -> float:
        """What the vectors of tokens are multiplied by."""
        return self.embedding_multiplier * (math.sqrt(self.embed) if self.traits.scaled_embedding else 1.0)

    @property
    def mlp_activation(self) -> str:
        """The activation of its MLPs, with the default filled in."""
        return self.traits.activation

    @property
    def mlp_gate(self) -> str:
        """Whether its MLPs have a gate, on or off, with the default filled in."""
        return "on" if self.traits.gated else "off"

    @property
    def norm_form(self) -> str:
        """Whether its norms are rms or layer (LayerNorm), with the default filled in."""
        if self.norm != "auto":
            return self.norm
        return "rms" if self.traits.rotary else "layer"

    @property
    def score_scale(self) -> float:
        """What a query times a key is multiplied by."""
        return self.attention_multiplier or self.usual_score_scale

    @property
    def usual_score_scale(self) -> float:
        """The same where no knob says another number (Vaswani et al. 2017, eq. 1)."""
        scale: float = self.head_size**-0.5
        return scale * self.rope.score_factor if self.kv_latent else scale

    @property
    def turned_size(self) -> int:
        """How many dims of a head rotary positions turn: the first ones, or the last ones in latent attention."""
        return self.rope_dim if self.kv_latent else int(self.head_size * self.rotary_fraction)

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions, with the default filled in."""
        return self.positions or self.sequence

    @property
    def rope(self) -> RopeScaling:
        """The scaling of the rotary positions."""
        return rope_scaling.parse(self.rope_scaling)

    @property
    def expert_size(self) -> int:
        """Width of each expert, with the default filled in."""
        return self.expert_mlp or self.mlp_size

    @property
    def gates_shared(self) -> bool:
        """Whether shared experts have a gate of their own."""
        return self.traits.routed and self.shared_experts > 0 and self.shared_gate

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that make the number of parameters, by their knobs; one of 0 follows from the others."""
        unused = () if self.traits.routed else EXPERT_SIZES
        if not self.kv_latent:
            unused = (*unused, *LATENT)
        return {knob: getattr(self, knob) for knob in SIZES if knob not in unused}

    @property
    def mlp_width(self) -> int:
        """The width that `mlp` gives: of the layers without experts, or of each expert where no layer is without."""
        return self.mlp_size if self.traits.forms else self.split_width

    @property
    def width_knob(self) -> str:
        """The knob that gives `split_width`."""
        return "expert_mlp" if self.traits.routed and self.expert_mlp else "mlp"

    @property
    def split_width(self) -> int:
        """The width that the model axis splits: that of each expert, or of the MLP."""
        return self.expert_size if self.traits.routed else self.mlp_size

    @property
    def mlp_size(self) -> int:
        """Width of the MLP (F), with the default filled in."""
        if self.mlp:
            return self.mlp
        if not self.traits.gated:
            return 4 * self.embed
        # Three matrices of width 8/3 x embed have as many parameters as two of width 4 x embed (Touvron et al. 2023,
        # section 2.2).
        return math.ceil(8 * self.embed / (3 * 256)) * 256


@lru_cache(maxsize=64)
def _with_knobs(traits: Traits, activation: str, gate: str, period: str, dense_layers: int) -> Traits:
    """Return the traits of a family with these values of knobs in the place of its own."""
    if activation != "auto":
        traits = traits._replace(activation=activation)
    if gate != "auto":
        traits = traits._replace(gated=gate == "on")
    if period:
        traits = traits._replace(period=periods.parse(period))
    if traits.routed and dense_layers:
        traits = traits._replace(forms=(("dense", dense_layers), ("routed", 0)))
    return traits
