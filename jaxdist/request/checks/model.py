"""Check the sizes of the model, and that its family uses the knobs that are set."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxdist.config import Config, ModelConfig
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.model import SIZES
from jaxdist.config.stacks import stacks_of
from jaxdist.output.units import closest, counted, divisors, multiples, remedy, to
from jaxdist.request.checks.registry import check

MOST_PARAMETERS = 2**44
"""17.6 trillion: more than anybody trains, and few enough for sizes in bytes to fit 64 bits."""


def decoder_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of a decoder, without biases and norms, which are few."""
    # An untied model has a second table as its output projection.
    table_rows = model.vocab if model.tied else 2 * model.vocab
    if not model.traits.rotary:
        # A table of learned positions.
        table_rows += model.position_rows
    layers = 0
    for stack in stacks_of(model).values():
        layers += stack.layers * sum(matmul.elements for matmul in matmuls_of(stack).values())
    return layers + table_rows * model.embed


@check("model.family", "model.tied", *(f"model.{size}" for size in SIZES))
def _parameters(config: Config) -> Iterator[str]:
    if config.model.images:
        return
    count = decoder_parameters(config.model)
    if count > MOST_PARAMETERS:
        given = ", ".join(f"model.{knob} {size}" for knob, size in config.model.sizes.items() if size)
        yield (
            f"{given} make a model of {count:.3g} parameters; at most {MOST_PARAMETERS:.3g} are planned or trained: "
            f"lower one of them"
        )


def head_counts(model: ModelConfig, ways: int = 1) -> list[int]:
    """Return the numbers of heads that fit the other sizes and divide by `ways`.

    Where the size of a head is given, any number fits the width of the model: these are the two next to its own.
    """
    if _has_head_dim(model):
        return multiples(math.lcm(ways, model.kv_heads or 1), near=model.heads)
    counts = [n for n in divisors(model.embed) if n % ways == 0]
    if model.traits.grouped and model.kv_heads:
        counts = [n for n in counts if n % model.kv_heads == 0]
    if model.traits.rotary:
        # Rotary positions rotate pairs of numbers, so the size of a head must be even.
        counts = [n for n in counts if model.embed // n % 2 == 0]
    return counts


def _has_head_dim(model: ModelConfig) -> bool:
    """Return whether the request gives the size of a head, to a family that uses it."""
    return model.traits.rotary and (model.head_dim > 0 or model.kv_latent > 0)


@check("model.family", "model.embed", "model.heads", "model.head_dim")
def _heads(config: Config) -> Iterator[str]:
    model = config.model
    if model.embed % model.heads and not _has_head_dim(model):
        yield f"model.embed {model.embed} does not divide by model.heads {model.heads}; {_other_heads(model)}"


@check("model.family", "model.embed", "model.heads", "model.head_dim")
def _rotary(config: Config) -> Iterator[str]:
    model = config.model
    if not model.traits.rotary or model.kv_latent:
        return
    if model.head_dim:
        if model.head_dim % 2:
            yield (
                f"model.head_dim {model.head_dim} is odd, but the rotary positions of {model.family} rotate pairs; "
                + remedy(to("model.head_dim", multiples(2, near=model.head_dim)))
            )
        return
    size, rest = divmod(model.embed, model.heads)
    if not rest and size % 2:
        yield (
            f"model.embed {model.embed} in {model.heads} model.heads makes heads of size {size}, but the rotary "
            f"positions of {model.family} rotate pairs and need an even size; {_other_heads(model)}"
        )


@check("model.family", "model.embed", "model.heads", "model.head_dim", "model.rotary_fraction")
def _turned(config: Config) -> Iterator[str]:
    model = config.model
    if not model.traits.rotary or model.rotary_fraction == 1 or model.kv_latent:
        return
    if model.turned_size < 2 or model.turned_size % 2:
        yield (
            f"model.rotary_fraction {model.rotary_fraction:g} of heads of size {model.head_size} are "
            f"{model.turned_size} dims, but rotary positions rotate pairs; take 2 / {model.head_size} or a multiple "
            f"of it"
        )


@check(
    "model.family",
    *(f"model.{knob}" for knob in ("kv_latent", "rope_dim", "heads", "kv_heads", "qkv_bias", "qk_norm", "sinks")),
    "model.rotary_fraction",
)
def _latent_attention(config: Config) -> Iterator[str]:
    model = config.model
    if not (model.traits.rotary and model.kv_latent):
        return
    has = f"model.kv_latent {model.kv_latent} makes keys and values of one latent vector, "
    if model.rope_dim % 2 or not model.rope_dim:
        yield (
            f"model.rope_dim is {model.rope_dim}, but rotary positions rotate pairs, and latent attention turns these "
            f"dims alone; " + remedy(to("model.rope_dim", multiples(2, near=model.rope_dim) or [2]))
        )
    if model.key_value_heads != model.heads:
        yield (
            f"{has}for each of model.heads {model.heads}, but model.kv_heads is {model.kv_heads}; leave it out, "
            f"which means as many"
        )
    given = []
    if model.qkv_bias:
        given.append("model.qkv_bias true")
    if model.qk_norm != "none":
        given.append(f"model.qk_norm {model.qk_norm}")
    if model.sinks:
        given.append("model.sinks true")
    if model.rotary_fraction != 1:
        given.append(f"model.rotary_fraction {model.rotary_fraction:g}")
    if given:
        yield f"{has}and knows no {' and no '.join(given)}; leave it out"


@check("model.family", "model.activation", "model.gate")
def _clamped(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.activation == "clamped-swiglu" and not model.traits.gated:
        yield "model.activation clamped-swiglu is of a gate and of what it gates, and model.gate is off; set it to on"


@check("model.family", "model.activation", "model.gate", "model.mlp_bias", "model.shared_experts")
def _experts_are_gated(config: Config) -> Iterator[str]:
    model = config.model
    if not model.traits.routed:
        return
    given = []
    if not model.traits.gated:
        given.append("model.gate off")
    if model.traits.activation == "xielu":
        given.append("model.activation xielu")
    if model.mlp_bias and model.shared_experts:
        yield (
            f"model.mlp_bias is true, and experts that all tokens share have none, but "
            f"model.shared_experts is {model.shared_experts}; set one of them to its default"
        )
    if given:
        yield f"model.family {model.family} has experts, whose MLPs have no {' and no '.join(given)}; leave it out"


def _other_heads(model: ModelConfig) -> str:
    heads = closest(head_counts(model), model.heads)
    unit = model.heads
    given_size = ""
    if model.traits.rotary:
        # The size of a head must be even, and may be given.
        unit *= 2
        given_size = to("model.head_dim", multiples(2, near=model.embed // model.heads))
    return remedy(to("model.heads", heads), to("model.embed", multiples(unit, near=model.embed)), given_size)


@check("model.family", "model.rope_theta", "model.rope_scaling")
def _yarn(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.rotary and model.rope.kind == "yarn" and model.rope_theta == 1:
        yield (
            "model.rope_theta is 1, with which all pairs of a head turn equally fast, but model.rope_scaling yarn "
            "tells them apart by how fast they turn; set model.rope_theta above 1, or model.rope_scaling to linear"
        )


@check("model.family", "model.rope_scaling", "model.embed", "model.heads", "model.head_dim")
def _longrope(config: Config) -> Iterator[str]:
    model = config.model
    numbers = len(model.rope.short)
    # Of a head that is turned in part (Phi-4 mini), of that part.
    pairs = model.turned_size // 2
    if model.traits.rotary and model.rope.kind == "longrope" and numbers != pairs:
        yield (
            f"model.rope_scaling longrope has {counted(numbers, 'number')} in short and in long, but a head "
            f"of {model.turned_size} turned dims has {counted(pairs, 'pair')}; give one for each of them"
        )


@check("model.family", "model.heads", "model.kv_heads")
def _key_value_heads(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.grouped and model.heads % model.key_value_heads:
        yield f"model.heads {model.heads} does not divide by model.kv_heads {model.kv_heads}; " + remedy(
            to("model.kv_heads", closest(divisors(model.heads), model.kv_heads)),
            to("model.heads", closest(head_counts(model), model.heads)),
        )


@check("model.family", "model.positions", "model.sequence")
def _positions(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.text and not model.traits.rotary and 0 < model.positions < model.sequence:
        yield (
            f"model.sequence {model.sequence} is longer than the table of learned positions, whose rows are "
            f"model.positions {model.positions}; lower model.sequence to at most {model.positions}"
        )
