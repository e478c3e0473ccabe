"""GPT-NeoX (Black et al. 2022, section 2.1), the type of Pythia: attention and MLP read the same, with biases."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType, Setting

ACTIVATIONS = {"gelu": "gelu-erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "silu": "silu"}

TYPES = {
    "gpt_neox": ModelType(
        family="llama",
        architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
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
