"""GPT-NeoX (Black et al. 2022, section 2.1), the type of Pythia: attention and MLP read the same, with biases."""

from __future__ import annotations

import re

from jaxdist.config import ModelConfig
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting

ACTIVATIONS = {"gelu": "gelu-erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "silu": "silu"}


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of GPT-NeoX: query, key and value of a head lie side by side in theirs, as in ours."""
    layer = "gpt_neox.layers.{layer}."
    attention = {"attention.qkv": layer + "attention.query_key_value", "o_proj": layer + "attention.dense"}
    mlp = {"up_proj": layer + "mlp.dense_h_to_4h", "down_proj": layer + "mlp.dense_4h_to_h"}
    leaves = [
        families.one("table", "VD", "gpt_neox.embed_in.weight", ("V", "D")),
        *families.norm(model, "norm", "D", "gpt_neox.final_layer_norm"),
        *families.norm(model, "blocks.norm1", "LD", layer + "input_layernorm"),
        *families.norm(model, "blocks.norm2", "LD", layer + "post_attention_layernorm"),
        *families.weights(model, "attention", attention),
        *families.weights(model, "mlp", mlp),
    ]
    # Masks of attention, one a layer, and the frequencies of rotary positions.
    ignored = re.compile(r"(.*\.)?(attention\.(masked_)?bias|rotary_emb\.inv_freq)")
    return families.with_output(model, leaves, "gpt_neox.embed_in.weight", "gpt_neox.", ignored, "embed_out.weight")


TYPES = {
    "gpt_neox": ModelType(
        family="llama",
        architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
        tensors=tensors,
        settings={
            "vocab_size": Setting("vocab", 50432),
            "hidden_size": Setting("embed", 6144),
            "intermediate_size": Setting("mlp", 24576),
            "num_hidden_layers": Setting("layers", 44),
            "num_attention_heads": Setting("heads", 64),
            "layer_norm_eps": Setting("norm_eps", 1e-5),
            "tie_word_embeddings": Setting("tied", False),
            "attention_bias": Setting("qkv_bias", True, also=("out_bias",)),
            "hidden_act": Setting("activation", "gelu", values=ACTIVATIONS),
            "use_parallel_residual": Setting("residual", True, values={True: "parallel", False: "sequential"}),
        },
        allowed={},
        implied={"norm": "layer", "gate": "off", "mlp_bias": True, "kv_heads": 0, "head_dim": 0},
        maximum="max_position_embeddings",
        maximum_default=2048,
        rotary_fraction=0.25,
        rotary_names=("rotary_emb_base", "rotary_pct"),
    )
}
