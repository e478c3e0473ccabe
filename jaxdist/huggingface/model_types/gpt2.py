"""GPT-2."""

from __future__ import annotations

import re

from jaxdist.config import ModelConfig
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of GPT-2, whose weights are [in, out] as ours are (`Conv1D`)."""
    layer = "transformer.h.{layer}."
    attention = {"attention.qkv": layer + "attn.c_attn", "o_proj": layer + "attn.c_proj"}
    mlp = {"up_proj": layer + "mlp.c_fc", "down_proj": layer + "mlp.c_proj"}
    leaves = [
        families.one("table", "VD", "transformer.wte.weight", ("V", "D")),
        families.one("positions", "SD", "transformer.wpe.weight", ("S", "D")),
        *families.norm(model, "norm", "D", "transformer.ln_f"),
        *families.norm(model, "blocks.norm1", "LD", layer + "ln_1"),
        *families.norm(model, "blocks.norm2", "LD", layer + "ln_2"),
        *families.weights(model, "attention", attention, inputs_first=True),
        *families.weights(model, "mlp", mlp, inputs_first=True),
    ]
    # Masks of attention, one a layer.
    ignored = re.compile(r"(.*\.)?attn\.(masked_)?bias")
    return families.with_output(model, leaves, "transformer.wte.weight", "transformer.", ignored)


TYPES = {
    "gpt2": ModelType(
        family="gpt",
        architectures=("GPT2LMHeadModel", "GPT2Model"),
        tensors=tensors,
        settings={
            "vocab_size": Setting("vocab", 50257),
            "n_positions": Setting("positions", 1024),
            "n_embd": Setting("embed", 768),
            "n_layer": Setting("layers", 12),
            "n_head": Setting("heads", 12),
            "n_inner": Setting("mlp", 0, null=0),
            "layer_norm_epsilon": Setting("norm_eps", 1e-5),
            "tie_word_embeddings": Setting("tied", True),
        },
        allowed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        implied={},
        maximum="n_positions",
        maximum_default=1024,
    ),
}
