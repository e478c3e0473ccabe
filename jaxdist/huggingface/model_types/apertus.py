"""Apertus (2025): an MLP without a gate whose activation, xIELU, is learned; norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from jaxdist.config import ModelConfig
from jaxdist.config.activation_numbers import XIELU_BETA, XIELU_EPS
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import BIAS_OF_ATTENTION, decoder

NORMS = {"norm1": "attention_layernorm", "norm2": "feedforward_layernorm"}


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of Llama with other names of norms, and the numbers of the activation."""
    mlp = families.LAYER + "mlp."
    names = {name: mlp + name for name in ("up_proj", "down_proj")}
    learned = tuple(families.Piece(f"{mlp}act_fn.{number}", ("I",)) for number in ("alpha_p", "alpha_n"))
    leaves = [
        *families.decoder(model, NORMS),
        *families.weights(model, "mlp", names),
        families.Leaf("blocks.mlp.learned", "LCI", learned),
    ]
    constants = {f"{mlp}act_fn.beta": XIELU_BETA, f"{mlp}act_fn.eps": XIELU_EPS}
    return replace(families.with_output(model, leaves), constants=constants)


TYPES = {
    "apertus": ModelType(
        family="llama",
        architectures=("ApertusForCausalLM", "ApertusModel"),
        tensors=tensors,
        settings={
            **{key: one for key, one in decoder(vocab=131072, kv_heads=0, mlp=14336).items() if key != "head_dim"},
            "rms_norm_eps": Setting("norm_eps", 1e-5),
            **BIAS_OF_ATTENTION,
        },
        allowed={"hidden_act": ("xielu",), "qk_norm": (True,), "post_norm": (False,)},
        implied={"activation": "xielu", "gate": "off", "qk_norm": "head"},
        maximum="max_position_embeddings",
        maximum_default=65536,
        theta=12_000_000.0,
        scaling="llama3,factor=8,original=8192",
    )
}
