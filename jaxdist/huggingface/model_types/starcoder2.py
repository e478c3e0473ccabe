"""StarCoder 2 (Lozhkov et al. 2024, section 6.1): LayerNorm, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from jaxdist.config import ModelConfig
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import decoder

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu-erf", "silu": "silu"}
ABSENT = ("head_dim", "rms_norm_eps")
"""Keys of Llama that this type has not."""


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of Llama with other names in the MLP."""
    names = {"up_proj": families.LAYER + "mlp.c_fc", "down_proj": families.LAYER + "mlp.c_proj"}
    return families.with_output(model, [*families.decoder(model), *families.weights(model, "mlp", names)])


TYPES = {
    "starcoder2": ModelType(
        family="llama",
        architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
        tensors=tensors,
        settings={
            **{key: one for key, one in decoder(vocab=49152, kv_heads=2, mlp=12288).items() if key not in ABSENT},
            "hidden_size": Setting("embed", 3072),
            "num_hidden_layers": Setting("layers", 30),
            "num_attention_heads": Setting("heads", 24),
            "norm_epsilon": Setting("norm_eps", 1e-5),
            "tie_word_embeddings": Setting("tied", True),
            "hidden_act": Setting("activation", "gelu_pytorch_tanh", values=ACTIVATIONS),
            "use_bias": Setting("qkv_bias", True, also=("out_bias", "mlp_bias")),
        },
        allowed={},
        implied={"norm": "layer", "gate": "off", "head_dim": 0},
        maximum="max_position_embeddings",
        maximum_default=4096,
        window="all",
        window_default=None,
        # Of training, as attention_dropout is; and of the first files, whose other values no version computes.
        unused=("residual_dropout", "embedding_dropout", "layer_norm_eps", "norm_type", "mlp_type"),
    )
}
