"""Make the tiny Hugging Face folders of tests/huggingface/golden, with the logits that transformers computes.

    pip install torch==2.13.0 transformers==5.24.0 accelerate
    python scripts/golden_huggingface.py tests/huggingface/golden

Each folder is one thing that decoders differ in. Its weights, norms and biases are random and stored in bfloat16;
`expected.npz` holds tokens [B, S] and the logits [B, S, V] of these stored weights, computed in float32. The folder
`llama31` is in two shards and has a tokenizer; `llama1` and `linear` have the keys of transformers 4 in `config.json`.
Tests read the folders without torch. Running this again with the same versions makes the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
)
ROUTED = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
"""Sizes of the models with experts."""

LATENT = dict(
    dict(ROUTED, num_hidden_layers=3, num_key_value_heads=4),
    first_k_dense_replace=1,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
"""The same of DeepSeek: keys and values have different sizes, and the first layer has no experts."""

SHAPE = (2, 48)
"""Rows and their length."""

ROUTED_SHAPE = (8, 16)
"""The same for models with experts, whose rows eight devices share."""


def rope(theta: float, kind: str = "default", **numbers: float) -> dict[str, Any]:
    """Return the part of a configuration that says how positions are turned."""
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **numbers))


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(factor=4.0, original_max_position_embeddings=16)

OSS = dict(
    # Where the pairs between which frequencies are mixed are no whole numbers.
    **rope(1e4, "yarn", factor=4.0, original_max_position_embeddings=48, truncate=False),
    head_dim=16,
    intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    pad_token_id=0,
)
"""Of gpt-oss."""


def longrope(original: int, short: list[float], long: list[float], **further: float) -> dict[str, Any]:
    """Return the part of a configuration of Phi-3, whose rows of 48 tokens are longer than `original`, or not."""
    lists = dict(short_factor=short, long_factor=long)
    parameters = rope(1e4, "longrope", original_max_position_embeddings=original, **lists, **further)
    return dict(parameters, original_max_position_embeddings=original)


def configurations() -> dict[str, transformers.PretrainedConfig]:
    """Return the configuration of each folder, by its name."""
    llama = transformers.LlamaConfig
    untied = dict(SIZES, tie_word_embeddings=False)
    tied = dict(SIZES, tie_word_embeddings=True)
    return {
        "llama1": llama(**dict(untied, num_key_value_heads=8), **rope(1e4), rms_norm_eps=1e-6),
        "llama31": llama(**untied, **rope(5e5, "llama3", **LLAMA3), rms_norm_eps=1e-5),
        "linear": llama(**untied, **rope(1e4, "linear", factor=2.0), rms_norm_eps=1e-5),
        "yarn": transformers.Qwen3Config(**untied, **rope(1e6, "yarn", **YARN), head_dim=8, rms_norm_eps=1e-6),
        "mistral": transformers.MistralConfig(**untied, **rope(1e6), rms_norm_eps=1e-5, sliding_window=8),
        "qwen2": transformers.Qwen2Config(**tied, **rope(1e6), rms_norm_eps=1e-6),
        "qwen3": transformers.Qwen3Config(**tied, **rope(1e6), head_dim=16, rms_norm_eps=1e-6),
        "olmo2": transformers.Olmo2Config(**untied, **rope(5e5), rms_norm_eps=1e-6),
        "olmo3": transformers.Olmo3Config(
            **dict(untied, num_hidden_layers=4),
            rope_theta=5e5,
            rope_scaling=dict(rope_type="yarn", **YARN),
            rms_norm_eps=1e-6,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            pad_token_id=0,
        ),
        "smollm3": transformers.SmolLM3Config(
            **dict(tied, num_hidden_layers=4), **rope(5e6), no_rope_layer_interval=2, pad_token_id=0
        ),
        "granite": transformers.GraniteConfig(
            **tied,
            **rope(1e4),
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=2.0,
            residual_multiplier=0.22,
            attention_multiplier=0.25,
            logits_scaling=4.0,
        ),
        "gpt_neox": transformers.GPTNeoXConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            max_position_embeddings=64,
            rotary_pct=0.25,
            bos_token_id=0,
            eos_token_id=1,
        ),
        "starcoder2": transformers.Starcoder2Config(
            **untied, **rope(1e5), norm_epsilon=1e-5, sliding_window=8, hidden_act="gelu_pytorch_tanh"
        ),
        "apertus": transformers.ApertusConfig(
            **untied, **rope(1.2e7, "llama3", **LLAMA3), rms_norm_eps=1e-5, pad_token_id=0
        ),
        "gemma": transformers.GemmaConfig(**tied, **rope(1e4), head_dim=16, rms_norm_eps=1e-6),
        "gemma2": transformers.Gemma2Config(
            **dict(tied, num_hidden_layers=4),
            **rope(1e4),
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=24,
            # Low, so that both are far from linear.
            attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **dict(tied, num_hidden_layers=4),
            rope_parameters=dict(
                sliding_attention=rope(1e3)["rope_parameters"],
                full_attention=rope(1e5, "linear", factor=4.0)["rope_parameters"],
            ),
            head_dim=8,
            sliding_window=8,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "phi3_short": transformers.Phi3Config(
            **untied, **longrope(64, short=[1.0, 1.1, 1.3, 1.5], long=[1.0, 1.5, 4.0, 8.0]), pad_token_id=0
        ),
        # Of each head, six of eight dims are turned.
        "phi4_mini": transformers.Phi3Config(
            **tied,
            **longrope(16, short=[1.0, 1.1, 1.5], long=[1.0, 2.0, 8.0], partial_rotary_factor=0.75),
            pad_token_id=0,
            sliding_window=24,
        ),
        "mixtral": transformers.MixtralConfig(
            **ROUTED, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, sliding_window=8
        ),
        "olmoe": transformers.OlmoeConfig(**ROUTED, intermediate_size=16, num_experts=8, num_experts_per_tok=3),
        "qwen2_moe": transformers.Qwen2MoeConfig(
            **ROUTED,
            intermediate_size=48,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=3,
        ),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **ROUTED,
            head_dim=16,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=4,
            norm_topk_prob=True,
        ),
        "granitemoe": transformers.GraniteMoeConfig(
            **ROUTED,
            intermediate_size=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            attention_bias=True,
            embedding_multiplier=2.0,
            residual_multiplier=0.22,
            attention_multiplier=0.25,
            logits_scaling=4.0,
        ),
        "deepseek_v2": transformers.DeepseekV2Config(
            **LATENT,
            **rope(1e4),
            q_lora_rank=None,
            n_shared_experts=2,
            topk_method="group_limited_greedy",
            routed_scaling_factor=4.0,
        ),
        "deepseek_v3": transformers.DeepseekV3Config(
            **LATENT,
            **rope(1e4, "yarn", **YARN, beta_fast=4.0, mscale=1.5, mscale_all_dim=0.707),
            q_lora_rank=24,
            n_shared_experts=1,
            routed_scaling_factor=2.5,
        ),
        "gpt_oss": transformers.GptOssConfig(**dict(ROUTED, num_hidden_layers=3), **dict(OSS, intermediate_size=16)),
        "gpt_oss_mxfp4": transformers.GptOssConfig(**dict(ROUTED, hidden_size=64, num_hidden_layers=1), **OSS),
        "gpt2": transformers.GPT2Config(
            vocab_size=97,
            n_embd=64,
            n_layer=2,
            n_head=8,
            n_positions=64,
            n_inner=128,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
        ),
    }


def make(config: transformers.PretrainedConfig, seed: int) -> torch.nn.Module:
    """Return a model whose weights, norms and biases are random numbers that bfloat16 holds."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that attention and activations are far from linear.
            parameter.add_(torch.randn_like(parameter) * 0.15)
            parameter.copy_(parameter.to(torch.bfloat16))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # So large that it decides which experts are chosen.
                buffer.copy_((torch.randn_like(buffer) * 0.2).to(torch.bfloat16))
        for name, parameter in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                # So large that a part of the gates, and of what they gate, is clamped.
                parameter.mul_(16)
    return model.eval()


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks and scales of MXFP4 for a weight [E, in, out], with the nearest of its numbers for each."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    power = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    scaled = groups / 2**power
    codes = (scaled.abs()[..., None] - numbers).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (power[..., 0] + 127).to(torch.uint8)


def as_mxfp4(folder: Path) -> None:
    """Rewrite the experts of a folder of gpt-oss in MXFP4, in which it was published."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        tensors[name + "_blocks"], tensors[name + "_scales"] = packed(tensors.pop(name).float())
    save_file(tensors, path, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | dict(quantization_config=dict(quant_method="mxfp4"))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Return the logits [B, S, V] in float32."""
    with torch.no_grad():
        return model.float()(tokens).logits.numpy()


def as_transformers_4(folder: Path) -> None:
    """Rewrite `config.json` with the keys of transformers 4."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else dict(type=kind, **parameters)
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.40.0"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE of fewer entries than the model has rows, which puts a BOS first, as Llama 3 does."""
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = ["the loss of one device is the loss of every mesh\n"] * 8
    bpe.train_from_iterator(text, trainers.BpeTrainer(vocab_size=60, special_tokens=[begin, end]))
    bpe.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=begin, eos_token=end)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    return fast


def write(name: str, config: transformers.PretrainedConfig, folder: Path) -> None:
    """Write one folder, read it back with transformers, and keep the logits of what was read."""
    model = make(config, seed=len(name))
    torch.manual_seed(1)
    shape = ROUTED_SHAPE if hasattr(config, "num_experts_per_tok") else SHAPE
    tokens = torch.randint(0, config.vocab_size, shape)
    expected = logits_of(model, tokens)
    shards = dict(max_shard_size="80KB") if name == "llama31" else {}
    model.to(torch.bfloat16)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            # As transformers keeps it in any dtype.
            buffer.data = buffer.data.float()
    model.save_pretrained(folder, **shards)
    if name in ("llama1", "linear"):
        as_transformers_4(folder)
    if name == "gpt_oss_mxfp4":
        as_mxfp4(folder)
    if name == "llama31":
        tokenizer().save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    again = logits_of(loaded.eval(), tokens)
    if name == "gpt_oss_mxfp4":
        # The rounded weights are others.
        expected = again
    assert np.array_equal(again, expected), f"{name}: reading the folder back changes the logits"
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=again)


def main() -> None:
    """Write every folder, or those that are named, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write the folders into")
    parser.add_argument("names", nargs="*", help="folders to write alone")
    asked = parser.parse_args()
    out = asked.out
    found = configurations()
    for name, config in ((name, found[name]) for name in asked.names or found):
        # Its tensors are no copies of ours, as those of the others are.
        folder = out.parent / "golden_mxfp4" if name == "gpt_oss_mxfp4" else out / name
        write(name, config, folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: {size:,} bytes, {len(list(folder.glob('*.safetensors')))} shard(s)")


if __name__ == "__main__":
    main()
