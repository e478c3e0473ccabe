"""Folders of Hugging Face for tests: those of `golden`, changed ones, and what is in them."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxdist.config import ModelConfig
from jaxdist.huggingface.folder import open_config
from jaxdist.huggingface.model_config import model_values

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir())


def model_of(path: Path, **more) -> ModelConfig:
    """The model of a folder, with rows of 16 tokens."""
    return ModelConfig(**{**model_values(open_config(path)), "sequence": 16, **more})


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by name."""
    return {name: array for file in sorted(path.glob("*.safetensors")) for name, array in load_file(file).items()}


def changed(name: str, to: Path, change=lambda tensors: None) -> Path:
    """A copy of a golden folder with one file of weights, whose tensors `change` may change."""
    tensors = tensors_of(GOLDEN / name)
    change(tensors)
    to.mkdir()
    shutil.copy(GOLDEN / name / "config.json", to)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def sharded(path: Path, files: dict[str, list[str]], index: dict[str, str]) -> None:
    """Write the weights of a folder again: `files` has the tensors in each file, `index` the file of each tensor."""
    tensors = tensors_of(path)
    (path / "model.safetensors").unlink()
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def assembled(path: Path, model: ModelConfig) -> dict[str, np.ndarray]:
    """Our parameters of a folder by their names, in float32, made with numpy from whole tensors."""
    theirs = {name: array.astype(np.float32) for name, array in tensors_of(path).items()}
    make = _gpt if model.family == "gpt" else _llama
    layers = [make(model, theirs, number) for number in range(model.layers)]
    ours = {f"blocks.{name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}
    if model.family == "gpt":
        ours |= {"table": theirs["transformer.wte.weight"], "positions": theirs["transformer.wpe.weight"]}
        ours |= {"norm.scale": theirs["transformer.ln_f.weight"], "norm.bias": theirs["transformer.ln_f.bias"]}
        return ours
    ours |= {"table": theirs["model.embed_tokens.weight"], "norm.scale": theirs["model.norm.weight"]}
    if not model.tied:
        ours["output"] = theirs["lm_head.weight"]
    return ours


def _llama(model: ModelConfig, theirs: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    of = lambda name, kind="weight": theirs[f"model.layers.{layer}.{name}.{kind}"]
    kv_heads, size = model.key_value_heads, model.head_size

    def heads(kind: str) -> np.ndarray:
        """Queries, key and value of each key/value head: [K, G + 2, H, ...]."""
        parts = [of(f"self_attn.{name}_proj", kind) for name in "qkv"]
        return np.concatenate([part.reshape(kv_heads, -1, size, *part.shape[1:]) for part in parts], axis=1)

    ours = {
        "norm1.scale": of("input_layernorm"),
        "norm2.scale": of("post_attention_layernorm"),
        "attention.qkv": np.moveaxis(heads("weight"), 3, 0),
        "attention.out": of("self_attn.o_proj").T.reshape(model.heads, size, model.embed),
    }
    if model.family == "moe":
        ours |= _experts(model, of)
    else:
        ours["mlp.gate_up"] = np.stack([of("mlp.gate_proj").T, of("mlp.up_proj").T], axis=1)
        ours["mlp.down"] = of("mlp.down_proj").T
    if model.qkv_bias:
        ours["attention.qkv_bias"] = heads("bias")
    if model.qk_norm == "head":
        ours["attention.q_norm.scale"] = of("self_attn.q_norm")
        ours["attention.k_norm.scale"] = of("self_attn.k_norm")
    if model.qk_norm == "full":
        scales = [of(f"self_attn.{name}_norm").reshape(kv_heads, -1, size) for name in "qk"]
        ours["attention.qk_norm.scale"] = np.concatenate(scales, axis=1)
    return ours


def _experts(model: ModelConfig, of) -> dict[str, np.ndarray]:
    """The MLPs of a layer with experts; `of` gives the tensors of the layer."""
    mixtral = model.qk_norm == "none"
    mlp = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([of(f"{mlp}.experts.{e}.{name}").T for e in range(model.experts)] for name in names)
    return {
        "mlp.router": of(f"{mlp}.gate").T,
        "mlp.gate_up": np.stack([np.stack(gate), np.stack(up)], axis=2),
        "mlp.down": np.stack(down),
        "mlp.balance": np.zeros(model.experts, np.float32),
    }


def _gpt(model: ModelConfig, theirs: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    of = lambda name: theirs[f"transformer.h.{layer}.{name}"]
    heads = (model.heads, model.head_size)
    return {
        **{
            f"norm{i}.{ours}": of(f"ln_{i}.{kind}")
            for i in (1, 2)
            for ours, kind in (("scale", "weight"), ("bias",) * 2)
        },
        "attention.qkv": of("attn.c_attn.weight").reshape(model.embed, 3, *heads),
        "attention.qkv_bias": of("attn.c_attn.bias").reshape(3, *heads),
        "attention.out": of("attn.c_proj.weight").reshape(*heads, model.embed),
        "attention.out_bias": of("attn.c_proj.bias"),
        "mlp.up": of("mlp.c_fc.weight"),
        "mlp.up_bias": of("mlp.c_fc.bias"),
        "mlp.down": of("mlp.c_proj.weight"),
        "mlp.down_bias": of("mlp.c_proj.bias"),
    }
