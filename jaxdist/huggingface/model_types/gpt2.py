"""GPT-2."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType, Setting

TYPES = {
    "gpt2": ModelType(
        family="gpt",
        architectures=("GPT2LMHeadModel", "GPT2Model"),
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
