"""Folders of Hugging Face for tests: those of `golden`, changed ones, and what is in them."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxdist.config import ModelConfig
from jaxdist.config.stacks import first_layers, path_to, stacks_of
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


def apart(theirs: dict[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors with those of Phi-3 cut into the ones that Llama has."""
    found = dict(theirs)
    keys = model.key_value_heads * model.head_size
    for name in theirs:
        if "qkv_proj" in name:
            parts = np.split(found.pop(name), np.cumsum([model.heads * model.head_size, keys]))
            found |= {name.replace("qkv_proj", f"{one}_proj"): part for one, part in zip("qkv", parts, strict=True)}
        if "gate_up_proj" in name and ".experts." not in name:
            parts = np.split(found.pop(name), 2)
            found |= {name.replace("gate_up", one): part for one, part in zip(("gate", "up"), parts, strict=True)}
    return found


def assembled(path: Path, model: ModelConfig) -> dict[str, np.ndarray]:
    """Our parameters of a folder by their names, in float32, made with numpy from whole tensors."""
    theirs = apart({name: array.astype(np.float32) for name, array in tensors_of(path).items()}, model)
    make = _gpt if model.family == "gpt" else _neox if _is_neox(model) else _llama
    ours = {}
    for name, stack in stacks_of(model).items():
        first = first_layers(model)[name]
        layers = [make(stack, theirs, first + number) for number in range(stack.layers)]
        ours |= {path_to(name) + path: np.stack([layer[path] for layer in layers]) for path in layers[0]}
    if model.family == "gpt":
        ours |= {"table": theirs["transformer.wte.weight"], "positions": theirs["transformer.wpe.weight"]}
        ours |= {"norm.scale": theirs["transformer.ln_f.weight"], "norm.bias": theirs["transformer.ln_f.bias"]}
        return ours
    if _is_neox(model):
        ours |= {"table": theirs["gpt_neox.embed_in.weight"], "output": theirs["embed_out.weight"]}
        norm = "gpt_neox.final_layer_norm."
        return ours | {"norm.scale": theirs[norm + "weight"], "norm.bias": theirs[norm + "bias"]}
    ours |= {"table": theirs["model.embed_tokens.weight"], "norm.scale": theirs["model.norm.weight"]}
    if model.norm == "layer":
        ours["norm.bias"] = theirs["model.norm.bias"]
    if not model.tied:
        ours["output"] = theirs["lm_head.weight"]
    return ours


def _is_neox(model: ModelConfig) -> bool:
    return model.residual == "parallel"


def _llama(model: ModelConfig, theirs: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    of = lambda name, kind="weight": theirs[f"model.layers.{layer}.{name}.{kind}"]
    kv_heads, size = model.key_value_heads, model.head_size

    def heads(kind: str) -> np.ndarray:
        """Queries, key and value of each key/value head: [K, G + 2, H, ...]."""
        parts = [of(f"self_attn.{name}_proj", kind) for name in "qkv"]
        return np.concatenate([part.reshape(kv_heads, -1, size, *part.shape[1:]) for part in parts], axis=1)

    ours = {
        **{f"{ours}.scale": of(name) for ours, name in _norms(model).items()},
        "attention.out": of("self_attn.o_proj").T.reshape(model.heads, -1, model.embed),
    }
    if model.kv_latent:
        ours |= _latent_attention(model, of)
    else:
        ours["attention.qkv"] = np.moveaxis(heads("weight"), 3, 0)
    if model.norm == "layer":
        ours |= {f"{ours}.bias": of(name, "bias") for ours, name in _norms(model).items()}
    if model.traits.routed:
        ours |= _experts(model, of)
    elif model.norm == "layer":
        for ours_name, name in (("up", "c_fc"), ("down", "c_proj")):
            ours |= {f"mlp.{ours_name}": of(f"mlp.{name}").T, f"mlp.{ours_name}_bias": of(f"mlp.{name}", "bias")}
    elif model.activation == "xielu":
        ours |= {"mlp.up": of("mlp.up_proj").T, "mlp.down": of("mlp.down_proj").T}
        ours["mlp.learned"] = np.stack([theirs[f"model.layers.{layer}.mlp.act_fn.{name}"] for name in XIELU])
    else:
        ours["mlp.gate_up"] = np.stack([of("mlp.gate_proj").T, of("mlp.up_proj").T], axis=1)
        ours["mlp.down"] = of("mlp.down_proj").T
    if model.qkv_bias:
        ours["attention.qkv_bias"] = heads("bias")
    if model.out_bias:
        ours["attention.out_bias"] = of("self_attn.o_proj", "bias")
    if model.sinks:
        ours["attention.sinks"] = theirs[f"model.layers.{layer}.self_attn.sinks"].reshape(kv_heads, -1, 1)
    if model.mlp_bias and model.family != "moe" and model.norm != "layer":
        ours["mlp.gate_up_bias"] = np.stack([of("mlp.gate_proj", "bias"), of("mlp.up_proj", "bias")])
        ours["mlp.down_bias"] = of("mlp.down_proj", "bias")
    if model.qk_norm == "head":
        ours["attention.q_norm.scale"] = of("self_attn.q_norm")
        ours["attention.k_norm.scale"] = of("self_attn.k_norm")
    if model.qk_norm == "full":
        scales = [of(f"self_attn.{name}_norm").reshape(kv_heads, -1, size) for name in "qk"]
        ours["attention.qk_norm.scale"] = np.concatenate(scales, axis=1)
    return ours


def _latent_attention(model: ModelConfig, of) -> dict[str, np.ndarray]:
    up = lambda name: np.moveaxis(np.stack(np.split(of(f"self_attn.{name}"), model.heads)), 2, 0)
    ours = {
        "attention.kv_down": of("self_attn.kv_a_proj_with_mqa").T,
        "attention.kv_norm.scale": of("self_attn.kv_a_layernorm"),
        "attention.kv_up": up("kv_b_proj"),
    }
    if not model.q_latent:
        return ours | {"attention.q": up("q_proj")}
    q = {"attention.q_down": of("self_attn.q_a_proj").T, "attention.q_norm.scale": of("self_attn.q_a_layernorm")}
    return ours | q | {"attention.q_up": up("q_b_proj")}


XIELU = ("alpha_p", "alpha_n")
"""The numbers of xIELU that are learned."""


def _norms(model: ModelConfig) -> dict[str, str]:
    """Their names of the norms over the residual stream, by ours."""
    if model.activation == "xielu":
        return {"norm1": "attention_layernorm", "norm2": "feedforward_layernorm"}
    if model.norms == "before":
        return {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    if model.norms == "after":
        return dict(zip(("norm1", "norm2"), after, strict=True))
    before = {"norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm"}
    return before | dict(zip(("norm1_after", "norm2_after"), after, strict=True))


def _neox(model: ModelConfig, theirs: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    of = lambda name, kind="weight": theirs[f"gpt_neox.layers.{layer}.{name}.{kind}"]
    heads = (model.heads, 3, model.head_size)
    qkv = "attention.query_key_value"
    return {
        **{f"norm1.{ours}": of("input_layernorm", kind) for ours, kind in (("scale", "weight"), ("bias", "bias"))},
        **{
            f"norm2.{ours}": of("post_attention_layernorm", kind) for ours, kind in (("scale", "weight"), ("bias",) * 2)
        },
        "attention.qkv": of(qkv).T.reshape(model.embed, *heads),
        "attention.qkv_bias": of(qkv, "bias").reshape(heads),
        "attention.out": of("attention.dense").T.reshape(*heads[::2], model.embed),
        "attention.out_bias": of("attention.dense", "bias"),
        "mlp.up": of("mlp.dense_h_to_4h").T,
        "mlp.up_bias": of("mlp.dense_h_to_4h", "bias"),
        "mlp.down": of("mlp.dense_4h_to_h").T,
        "mlp.down_bias": of("mlp.dense_4h_to_h", "bias"),
    }


def _experts(model: ModelConfig, of) -> dict[str, np.ndarray]:
    """The MLPs of a layer with experts; `of` gives the tensors of the layer."""
    balance = np.zeros(model.experts, np.float32)
    if model.qk_norm == "none" and model.embedding_multiplier != 1:
        # Granite has those of all experts in one tensor, [E, 2 F, D] and [E, D, F].
        gate_up = of("block_sparse_moe.input_linear").reshape(model.experts, 2, -1, model.embed)
        return {
            "mlp.router": of("block_sparse_moe.router.layer").T,
            "mlp.gate_up": gate_up.transpose(0, 3, 1, 2),
            "mlp.down": of("block_sparse_moe.output_linear").transpose(0, 2, 1),
            "mlp.balance": balance,
        }
    if model.sinks:
        gate_up = of("mlp.experts", "gate_up_proj")
        return {
            "mlp.router": of("mlp.router").T,
            "mlp.router_bias": of("mlp.router", "bias"),
            "mlp.gate_up": np.stack([gate_up[..., ::2], gate_up[..., 1::2]], axis=2),
            "mlp.gate_up_bias": of("mlp.experts", "gate_up_proj_bias").reshape(model.experts, -1, 2).swapaxes(1, 2),
            "mlp.down": of("mlp.experts", "down_proj"),
            "mlp.down_bias": of("mlp.experts", "down_proj_bias"),
            "mlp.balance": balance,
        }
    mixtral = model.qk_norm == "none" and not model.kv_latent and not model.shared_gate
    shared = {}
    if model.shared_experts:
        theirs = "mlp.shared_expert" if model.shared_gate else "mlp.shared_experts"
        gate, up, down = (of(f"{theirs}.{name}_proj").T for name in ("gate", "up", "down"))
        shared = {"mlp.shared_gate_up": np.stack([gate, up], axis=1), "mlp.shared_down": down}
    if model.shared_gate:
        shared["mlp.shared_gate"] = of("mlp.shared_expert_gate").T
    if model.router == "sigmoid":
        balance = of("mlp.gate", "e_score_correction_bias")
    mlp = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([of(f"{mlp}.experts.{e}.{name}").T for e in range(model.experts)] for name in names)
    return {
        "mlp.router": of(f"{mlp}.gate").T,
        "mlp.gate_up": np.stack([np.stack(gate), np.stack(up)], axis=2),
        "mlp.down": np.stack(down),
        "mlp.balance": balance,
        **shared,
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
