"""Check the sizes of the model, and that its family uses the knobs that are set."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config, ModelConfig
from jaxdist.request.checks.registry import check, unused
from jaxdist.units import closest, divisors, multiples, remedy, to

MOST_PARAMETERS = 2**44
"""17.6 trillion: more than anybody trains, and few enough for sizes in bytes to fit 64 bits."""


def decoder_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of a decoder, without biases and norms, which are few."""
    # Queries and the output projection are embed x embed; keys and values are narrower with grouped-query attention.
    head_size = model.embed // model.heads
    attention = 2 * model.embed**2 + 2 * model.embed * head_size * model.key_value_heads
    # An untied model has a second table as its output projection.
    table_rows = model.vocab if model.tied else 2 * model.vocab
    if not model.traits.rotary:
        # A table of learned positions.
        table_rows += model.sequence
    matrices = 3 if model.traits.gated else 2
    mlp = matrices * model.embed * model.mlp_size
    return model.layers * (attention + mlp) + table_rows * model.embed


SIZES = ("layers", "embed", "heads", "kv_heads", "mlp", "vocab", "sequence")


@check("model.family", "model.tied", *(f"model.{size}" for size in SIZES))
def _parameters(config: Config) -> Iterator[str]:
    if config.model.images:
        return
    count = decoder_parameters(config.model)
    if count > MOST_PARAMETERS:
        sizes = [(f"model.{size}", getattr(config.model, size)) for size in SIZES]
        # A size of 0 follows from the others.
        given = ", ".join(f"{name} {value}" for name, value in sizes if value)
        yield (
            f"{given} make a model of {count:.3g} parameters; at most {MOST_PARAMETERS:.3g} are planned or trained: "
            f"lower one of them"
        )


def head_counts(model: ModelConfig, ways: int = 1) -> list[int]:
    """Return the numbers of heads that fit the other sizes and divide by `ways`."""
    counts = [n for n in divisors(model.embed) if n % ways == 0]
    if model.traits.grouped and model.kv_heads:
        counts = [n for n in counts if n % model.kv_heads == 0]
    if model.traits.rotary:
        # Rotary positions rotate pairs of numbers, so the size of a head must be even.
        counts = [n for n in counts if model.embed // n % 2 == 0]
    return counts


@check("model.embed", "model.heads")
def _heads(config: Config) -> Iterator[str]:
    embed = config.model.embed
    heads = config.model.heads
    if embed % heads:
        yield f"model.embed {embed} does not divide by model.heads {heads}; {_other_heads(config.model)}"


@check("model.family", "model.embed", "model.heads")
def _rotary(config: Config) -> Iterator[str]:
    model = config.model
    size, rest = divmod(model.embed, model.heads)
    if model.traits.rotary and not rest and size % 2:
        yield (
            f"model.embed {model.embed} in {model.heads} model.heads makes heads of size {size}, but the rotary "
            f"positions of {model.family} rotate pairs and need an even size; {_other_heads(model)}"
        )


def _other_heads(model: ModelConfig) -> str:
    heads = closest(head_counts(model), model.heads)
    unit = model.heads
    if model.traits.rotary:
        # The size of a head must be even.
        unit *= 2
    return remedy(to("model.heads", heads), to("model.embed", multiples(unit, near=model.embed)))


@check("model.family", "model.heads", "model.kv_heads")
def _key_value_heads(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.grouped and model.heads % model.key_value_heads:
        yield f"model.heads {model.heads} does not divide by model.kv_heads {model.kv_heads}; " + remedy(
            to("model.kv_heads", closest(divisors(model.heads), model.kv_heads)),
            to("model.heads", closest(head_counts(model), model.heads)),
        )


OF_LLAMA = ("kv_heads", "head_dim", "rope_theta", "rope_scaling", "qkv_bias", "qk_norm")
"""Knobs of attention that only families with rotary positions use."""


@check("model.family", "model.positions", *(f"model.{name}" for name in OF_LLAMA))
def _attention(config: Config) -> Iterator[str]:
    model = config.model
    # Of models of images, `_other_kind` reports all knobs of text.
    if not model.traits.text:
        return
    for name in ("positions",) if model.traits.rotary else OF_LLAMA:
        yield from unused(config, f"model.{name}", f"model.family {model.family}")


@check("model.family", "model.positions", "model.sequence")
def _positions(config: Config) -> Iterator[str]:
    model = config.model
    if model.traits.text and not model.traits.rotary and 0 < model.positions < model.sequence:
        yield (
            f"model.sequence {model.sequence} is longer than the table of learned positions, whose rows are "
            f"model.positions {model.positions}; lower model.sequence to at most {model.positions}"
        )


@check("model.family", "model.dropout")
def _no_dropout(config: Config) -> Iterator[str]:
    model = config.model
    if not model.traits.dropout:
        yield from unused(config, "model.dropout", f"model.family {model.family}, which has no dropout,")


TEXT_KNOBS = (
    "model.layers",
    "model.embed",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.rope_theta",
    "model.rope_scaling",
    "model.qkv_bias",
    "model.qk_norm",
    "model.norm_eps",
    "model.mlp",
    "model.vocab",
    "model.sequence",
    "model.positions",
    "model.window",
    "model.tied",
    "model.remat",
    "model.documents",
    "data.tokenizer",
    "parallel.sequence",
    "parallel.micro_batches",
    "parallel.rules.heads",
    "parallel.rules.mlp",
    "parallel.rules.vocab",
)
"""Knobs that only models of text use."""

IMAGE_KNOBS = ("model.classes", "model.image", "model.channels", "data.augment")
"""Knobs that only models of images use."""


@check("model.family", *TEXT_KNOBS, *IMAGE_KNOBS)
def _other_kind(config: Config) -> Iterator[str]:
    for name in TEXT_KNOBS if config.model.images else IMAGE_KNOBS:
        yield from unused(config, name, f"model.family {config.model.family}")
