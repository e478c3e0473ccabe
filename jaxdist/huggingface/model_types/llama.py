"""Llama, and the types whose layers differ from it in biases, norms of queries and keys, and windows."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType
from jaxdist.huggingface.model_types.shared import BIAS_OF_ATTENTION, BIAS_OF_MLP, SILU, decoder

TYPES = {
    "llama": ModelType(
        family="llama",
        architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
        settings={**decoder(vocab=32000, kv_heads=0, mlp=11008), **BIAS_OF_ATTENTION, **BIAS_OF_MLP},
        allowed=SILU,
        implied={},
        maximum="max_position_embeddings",
        maximum_default=2048,
    ),
    "mistral": ModelType(
        family="llama",
        architectures=("MistralForCausalLM", "MistralModel"),
        settings=decoder(vocab=32000, kv_heads=8, mlp=14336),
        allowed=SILU,
        implied={},
        maximum="max_position_embeddings",
        maximum_default=131072,
        window="all",
    ),
    "qwen2": ModelType(
        family="llama",
        architectures=("Qwen2ForCausalLM", "Qwen2Model"),
        settings=decoder(vocab=151936, kv_heads=32, mlp=22016),
        allowed=SILU,
        implied={"qkv_bias": True},
        maximum="max_position_embeddings",
        maximum_default=32768,
        window="some",
    ),
    "qwen3": ModelType(
        family="llama",
        architectures=("Qwen3ForCausalLM", "Qwen3Model"),
        settings={**decoder(vocab=151936, kv_heads=32, mlp=22016, head_dim=128), **BIAS_OF_ATTENTION},
        allowed=SILU,
        implied={"qk_norm": "head"},
        maximum="max_position_embeddings",
        maximum_default=32768,
        window="some",
    ),
}
