"""The sizes of the model, and what its family has."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config, ModelConfig
from jaxdist.request.checks.registry import check, unused
from jaxdist.units import closest, divisors, multiples, remedy, to

MOST_PARAMETERS = 2**44
"""17.6 trillion: beyond what anybody trains, and sizes still fit 64 bits."""


def decoder_parameters(model: ModelConfig) -> int:
    """The matrices of a decoder: of its blocks, and its tables. Biases and norms, which are few, are left out."""
    gpt = model.family == "gpt"
    attention = 2 * model.embed**2 + 2 * model.embed * (model.embed // model.heads) * model.key_value_heads
    mlp = (2 if gpt else 3) * model.embed * model.mlp_size
    rows = model.vocab * (1 if model.tied else 2) + (model.sequence if gpt else 0)
    return model.layers * (attention + mlp) + rows * model.embed


SIZES = ("layers", "embed", "heads", "kv_heads", "mlp", "vocab", "sequence")


@check("model.family", "model.tied", *(f"model.{size}" for size in SIZES))
def _parameters(config: Config) -> Iterator[str]:
    if config.model.images:
        return
    count = decoder_parameters(config.model)
    if count > MOST_PARAMETERS:
        sizes = [(f"model.{size}", getattr(config.model, size)) for size in SIZES]
        asked = ", ".join(f"{name} {value}" for name, value in sizes if value)  # 0 follows from the others
        yield (
            f"{asked} make a model of {count:.3g} parameters; at most {MOST_PARAMETERS:.3g} are planned or trained: "
            f"lower one of them"
        )


def head_counts(model: ModelConfig, ways: int = 1) -> list[int]:
    """The numbers of heads that fit the other sizes and divide by `ways`."""
    llama = model.family == "llama"
    unit = model.kv_heads if llama and model.kv_heads else 1
    even = 2 if llama else 1
    return [n for n in divisors(model.embed) if n % ways == n % unit == 0 and model.embed // n % even == 0]


@check("model.embed", "model.heads")
def _heads(config: Config) -> Iterator[str]:
    embed, heads = config.model.embed, config.model.heads
    if embed % heads:
        yield f"model.embed {embed} does not divide by model.heads {heads}; {_other_heads(config.model)}"


@check("model.family", "model.embed", "model.heads")
def _rotary(config: Config) -> Iterator[str]:
    model = config.model
    size, rest = divmod(model.embed, model.heads)
    if model.family == "llama" and not rest and size % 2:
        yield (
            f"model.embed {model.embed} in {model.heads} model.heads makes heads of size {size}, but the rotary "
            f"positions of llama turn pairs and need an even size; {_other_heads(model)}"
        )


def _other_heads(model: ModelConfig) -> str:
    unit = model.heads * (2 if model.family == "llama" else 1)
    heads = closest(head_counts(model), model.heads)
    return remedy(to("model.heads", heads), to("model.embed", multiples(unit, near=model.embed)))


@check("model.family", "model.heads", "model.kv_heads")
def _key_value_heads(config: Config) -> Iterator[str]:
    model = config.model
    if model.family == "llama" and model.heads % model.key_value_heads:
        yield f"model.heads {model.heads} does not divide by model.kv_heads {model.kv_heads}; " + remedy(
            to("model.kv_heads", closest(divisors(model.heads), model.kv_heads)),
            to("model.heads", closest(head_counts(model), model.heads)),
        )


@check("model.family", "model.kv_heads", "model.rope_theta")
def _gpt(config: Config) -> Iterator[str]:
    if config.model.family == "gpt":
        yield from unused(config, "model.kv_heads", "model.family gpt")
        yield from unused(config, "model.rope_theta", "model.family gpt")


@check("model.family", "model.dropout")
def _no_dropout(config: Config) -> Iterator[str]:
    family = config.model.family
    if family not in ("gpt", "cnn"):
        yield from unused(config, "model.dropout", f"model.family {family}, which has no dropout,")


OF_TEXT = (
    *("model.layers", "model.embed", "model.heads", "model.kv_heads", "model.rope_theta", "model.mlp", "model.vocab"),
    *("model.sequence", "model.tied", "model.remat", "model.documents", "data.tokenizer"),
    *("parallel.sequence", "parallel.micro_batches", "parallel.rules.heads", "parallel.rules.mlp"),
    "parallel.rules.vocab",
)
OF_IMAGES = ("model.classes", "model.image", "model.channels", "data.augment")


@check("model.family", *OF_TEXT, *OF_IMAGES)
def _other_kind(config: Config) -> Iterator[str]:
    for name in OF_TEXT if config.model.images else OF_IMAGES:
        yield from unused(config, name, f"model.family {config.model.family}")
