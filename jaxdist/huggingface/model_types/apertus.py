"""Apertus (2025): an MLP without a gate whose activation, xIELU, is learned; norms of queries and keys."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import BIAS_OF_ATTENTION, decoder

TYPES = {
    "apertus": ModelType(
        family="llama",
        architectures=("ApertusForCausalLM", "ApertusModel"),
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
