"""Make the tiny Hugging Face folders of tests/huggingface/golden, with the logits that transformers computes.

    pip install torch==2.13.0 transformers==5.24.0
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

SHAPE = (2, 48)
"""Rows and their length."""

ROUTED_SHAPE = (8, 16)
"""The same for models with experts, whose rows eight devices share."""


def rope(theta: float, kind: str = "default", **numbers: float) -> dict[str, Any]:
    """Return the part of a configuration that says how positions are turned."""
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **numbers))


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(factor=4.0, original_max_position_embeddings=16)


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
        "mixtral": transformers.MixtralConfig(
            **ROUTED, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, sliding_window=8
        ),
        "olmoe": transformers.OlmoeConfig(**ROUTED, intermediate_size=16, num_experts=8, num_experts_per_tok=3),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **ROUTED,
            head_dim=16,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=4,
            norm_topk_prob=True,
        ),
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
    return model.eval()


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
    model.to(torch.bfloat16).save_pretrained(folder, **shards)
    if name in ("llama1", "linear"):
        as_transformers_4(folder)
    if name == "llama31":
        tokenizer().save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    again = logits_of(loaded.eval(), tokens)
    assert np.array_equal(again, expected), f"{name}: reading the folder back changes the logits"
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=again)


def main() -> None:
    """Write every folder and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write the folders into")
    out = parser.parse_args().out
    for name, config in configurations().items():
        write(name, config, out / name)
        size = sum(path.stat().st_size for path in (out / name).iterdir())
        print(f"{name}: {size:,} bytes, {len(list((out / name).glob('*.safetensors')))} shard(s)")


if __name__ == "__main__":
    main()
