"""LoRA runs that have saved the golden adapters, which PEFT has made (`scripts/golden_peft.py`)."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard
from safetensors.numpy import load_file

from jaxdist.config import Config, ModelConfig, lora
from jaxdist.huggingface.reading import read_parameters
from jaxdist.parallel.partial_trees import joined
from jaxdist.request import to_toml
from jaxdist.training.run import Run
from jaxdist.weights.base import base_of
from tests.huggingface.exported import GOLDEN, abstract, save
from tests.huggingface.golden import config_of, expected

ADAPTERS = Path(__file__).parent / "golden_adapters"
READ = sorted(path.name for path in ADAPTERS.iterdir())
KNOBS = {
    "llama31": dict(lora_rank=4, lora_alpha=12.0),
    "qwen3_moe": dict(lora_rank=3, lora_targets="q_proj,v_proj"),
    "gpt2": dict(lora_rank=2),
}
"""How a run asks for the adapters of a folder; where alpha is left out, it is twice the rank."""
NAMES = sorted(KNOBS)
"""The folders of whose adapters runs are made; those of the others are only read."""

FACTS = dict(steps=1, data="", best=None, baseline=dict(nats=1.0, name="unigram", unit="token"))
"""What each checkpoint says."""

Halves = dict[str, np.ndarray]


def of_peft(name: str) -> Halves:
    """The tensors of a golden adapter, by PEFT's names."""
    return load_file(ADAPTERS / name / "adapter_model.safetensors")


def adapters(name: str, model: ModelConfig) -> dict:
    """The golden adapters as our parameters, made with numpy from PEFT's tensors."""
    make = _gpt if model.family == "gpt" else _decoder
    layers = [make(model, of_peft(name), layer) for layer in range(model.layers)]
    tree: dict = {}
    for path in layers[0]:
        part, target, half = path.split(".")
        inner = tree.setdefault(part, {"lora": {}})["lora"].setdefault(target, {})
        inner[half] = jnp.stack([layer[path] for layer in layers])
    return {"blocks": tree}


def _decoder(model: ModelConfig, theirs: Halves, layer: int) -> Halves:
    """The adapters of one layer of a Llama, or of one with experts."""
    heads = (model.key_value_heads, -1, model.head_size)
    inputs = {"o_proj": (model.heads, model.head_size)}
    outputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), heads) | dict.fromkeys(("gate_proj", "up_proj"), (1, -1))
    ours = {}
    for name, numbers in theirs.items():
        module, _, half = name.removeprefix(f"base_model.model.model.layers.{layer}.").rpartition(".lora_")
        if module.startswith("base_model"):
            continue
        part, target = module.split(".")
        path = f"{dict(self_attn='attention').get(part, part)}.{target}"
        if half == "A.weight":
            ours[f"{path}.a"] = numbers.T.reshape(*inputs.get(target, (-1,)), model.lora_rank)
        else:
            ours[f"{path}.b"] = numbers.T.reshape(model.lora_rank, *outputs.get(target, (-1,)))
    return ours


def _gpt(model: ModelConfig, theirs: Halves, layer: int) -> Halves:
    """The adapters of one layer of GPT-2, whose queries, keys and values are one module."""
    rank = model.lora_rank
    heads = (model.heads, model.head_size)
    of = lambda module, half: theirs[f"base_model.model.transformer.h.{layer}.{module}.lora_{half}.weight"].T
    ours = {}
    for place, target in enumerate(("q_proj", "k_proj", "v_proj")):
        own = slice(place * rank, (place + 1) * rank)
        ours[f"attention.{target}.a"] = of("attn.c_attn", "A")[:, own]
        ours[f"attention.{target}.b"] = of("attn.c_attn", "B").reshape(3 * rank, 3, *heads)[own, place : place + 1]
    ours["attention.o_proj.a"] = of("attn.c_proj", "A").reshape(*heads, rank)
    ours["attention.o_proj.b"] = of("attn.c_proj", "B")
    for target, module in (("up_proj", "mlp.c_fc"), ("down_proj", "mlp.c_proj")):
        ours[f"mlp.{target}.a"] = of(module, "A")
        ours[f"mlp.{target}.b"] = of(module, "B")
    return ours


def lora_run(name: str, run: Path, base: Path | None = None, **changed: object) -> Config:
    """A LoRA run beside a golden folder, or beside `base`, that has saved the golden adapters of its targets."""
    base = base or GOLDEN / name
    config = config_of(name, **KNOBS[name] | changed)
    params = {}
    for part, modules in adapters(name, config.model)["blocks"].items():
        own = {target: pair for target, pair in modules["lora"].items() if target in lora.adapted(config.model)}
        params |= {part: {"lora": own}} if own else {}
    save(run, {"blocks": params}, **FACTS, **base_of(base).facts())
    config = config.model_copy(update={"run_dir": run, "init_from": base})
    (run / "config.toml").write_text(to_toml(config))
    return config


def peft_logits(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [1, S], and the logits [1, S, V] that PEFT computes."""
    tokens, _ = expected(name)
    with np.load(ADAPTERS / name / "expected.npz") as arrays:
        return tokens[:1], arrays["logits"]


def adapted_logits(name: str, tokens: np.ndarray) -> np.ndarray:
    """Our logits [B, S, V] of a golden folder with the golden adapters beside its weights."""
    config = config_of(name, **KNOBS[name])
    run = Run(config, batch=False)
    base = read_parameters(GOLDEN / name, config.model, abstract(config.model))
    params = joined(base, adapters(name, config.model))
    with jax.set_mesh(run.mesh):

        @jax.jit
        def compute(params, tokens):
            return run.forward.logits(run.forward.weights(params), reshard(tokens, run.layout.activation("BS")))

        placed = jax.device_put(params, jax.NamedSharding(run.mesh, jax.P()))
        return np.asarray(compute(placed, tokens))[..., : config.model.vocab]
