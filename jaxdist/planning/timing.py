"""The arithmetic of a step, and the share of the devices' peak that it reaches."""

from __future__ import annotations

from functools import lru_cache

from jaxdist.config import Config, ModelConfig
from jaxdist.config.matmuls import head_sizes_of, matmuls_of
from jaxdist.config.stacks import stacks_of
from jaxdist.config.trained import all_trained_beside


def flops_of_step(config: Config) -> int:
    """Return the FLOPs of a step for one token: to train on it, and for a reference that the step computes."""
    reference = forward_flops_per_token(config.model) if config.refers_in_step else 0
    return flops_per_token(config.model) + reference


def flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs to train on one token, forward and backward, without recomputation.

    They are 6 for every parameter that multiplies the token (PaLM, Chowdhery et al. 2022, appendix B), and three times
    those of attention's forward pass. Of the experts, only those that a token chooses multiply it. Frozen parameters
    have no gradient, and count 4 times.
    """
    attention = sum(round(3 * stack.layers * attention_flops_per_token(stack)) for stack in stacks_of(model).values())
    return flops_per_parameter(model) * _matrices(model) + 6 * all_trained_beside(model) + attention


def forward_flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs of one token in a forward pass, in which adapters have no part."""
    attention = sum(round(stack.layers * attention_flops_per_token(stack)) for stack in stacks_of(model).values())
    return 2 * _matrices(model) + attention


def _matrices(model: ModelConfig) -> int:
    """Return the parameters of all matrices that multiply one token, the output table included."""
    of_layers = sum(stack.layers * matrices_per_layer(stack) for stack in stacks_of(model).values())
    return model.vocab * model.embed + of_layers


def flops_of_padding(model: ModelConfig, padding: float) -> int:
    """Return the FLOPs to train on one token that experts spend on padding: they compute `padding` rows for one."""
    chosen = 0
    for stack in stacks_of(model).values():
        of_experts = [matmul for matmul in matmuls_of(stack).values() if matmul.stacked]
        chosen += stack.layers * sum(matmul.elements_of_token for matmul in of_experts)
    return round(flops_per_parameter(model) * chosen * (padding - 1))


def flops_per_parameter(model: ModelConfig) -> int:
    """Return the FLOPs of a token with each parameter of a matrix: 2 forward, 2 for the input, 2 for a gradient."""
    return 4 if model.frozen else 6


def flops_formula(config: Config) -> str:
    """Describe what `flops_of_step` counts."""
    formula = _formula(config.model)
    if config.refers_in_step:
        formula += f" + {forward_flops_per_token(config.model):,} of the reference, forward alone"
    return formula


def _formula(model: ModelConfig) -> str:
    width = "embed" if model.heads * model.head_size == model.embed else "heads x head_dim"
    share = _share_in_window(model)
    if share == 1:
        tokens = "(2 x window - window^2 / sequence)"
        kind = "causal attention in a window"
    elif share:
        tokens = f"({share:.4g} x (2 x window - window^2 / sequence) + {1 - share:.4g} x sequence)"
        kind = "causal attention, in a window in some layers"
    else:
        tokens = "sequence"
        kind = "causal attention"
    matrices = "matrix parameters (output table included)"
    if model.traits.routed:
        matrices = (
            f"active matrix parameters (output table included, {model.experts_per_token} of {model.experts} experts)"
        )
    times = f"4 x frozen {matrices} + 6 x adapters" if model.frozen else f"6 x {matrices}"
    return f"{times} + 6 x layers x {tokens} x {width} ({kind})"


def has_window(model: ModelConfig) -> bool:
    """Return whether a sliding window hides something from a row of tokens, in some layers at least."""
    return _share_in_window(model) > 0


# A search asks this, and how many keys a query sees, of a few models, thousands of times.
@lru_cache(maxsize=64)
def _share_in_window(model: ModelConfig) -> float:
    """Return the share of the layers in which a sliding window hides something."""
    return sum(share for kind, share in model.shares_of_kinds.items() if 0 < kind.window < model.sequence)


def in_window(model: ModelConfig) -> str:
    """Return the end of a line about a model whose attention has a sliding window; empty for another."""
    share = _share_in_window(model)
    if not share:
        return ""
    where = "" if share == 1 else f" in {round(share * model.layers)} of {model.layers} layers"
    return f"; attention in a window of {model.window:,} tokens{where}"


def attention_flops_per_token(model: ModelConfig) -> float:
    """Return the forward FLOPs of attention's two matmuls of queries with keys, for one token in one layer."""
    return 2 * keys_per_query(model) * model.heads * sum(head_sizes_of(model))


@lru_cache(maxsize=64)
def keys_per_query(model: ModelConfig) -> float:
    """Return how many keys a query sees, on average over a row of S tokens.

    They are S / 2, because a causal model needs one half of the S x S square. A window of W tokens hides a triangle of
    that half, whose sides are S - W tokens: this leaves W - W^2 / 2S. Of several kinds of layers, it is their mean.
    """
    mean = 0.0
    for kind, share in model.shares_of_kinds.items():
        seen = min(kind.window or model.sequence, model.sequence)
        mean += share * (seen - seen**2 / (2 * model.sequence))
    return mean


def matrices_per_layer(model: ModelConfig) -> int:
    """Return the parameters of the matrices of a layer, one of a stack, that multiply one token.

    Of experts they are those that the token chooses. Biases and norms are left out, since no matmul reads them.
    """
    return sum(matmul.elements_of_token for matmul in matmuls_of(model).values())


def mfu(tokens_per_second: float, flops: int | None, devices: int, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation, or None where `flops` or `peak` is not known.

    `flops` are per token, `peak` is per second of one device.
    """
    if peak is None or flops is None:
        return None
    return tokens_per_second * flops / (devices * peak)
