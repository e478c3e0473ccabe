"""Runs that begin with adapters of PEFT: they compute what PEFT computes, and refuse by name what they cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import reshard
from safetensors.numpy import load_file, save_file

from jaxdist.config import Config, RequestError, lora
from jaxdist.huggingface.adapter_pairs import pairs_of
from jaxdist.huggingface.families import sizes_of
from jaxdist.huggingface.merging import merged
from jaxdist.huggingface.parts import shape_of
from jaxdist.huggingface.peft_adapter import write_adapter
from jaxdist.huggingface.peft_reading import PeftAdapter
from jaxdist.huggingface.readable import Block, Region, read
from jaxdist.request import load
from jaxdist.training.run import Run
from jaxdist.weights.base import base_for
from jaxdist.weights.source import source_of
from tests.huggingface.adapters import ADAPTERS, READ, peft_logits
from tests.huggingface.exported import GOLDEN, model_of

Numbers = dict[str, np.ndarray]


def nothing(_: dict) -> None:
    """Leave it as it is."""


def folder_of(
    name: str, place: Path, config: Callable[[dict], object] = nothing, tensors: Callable[[Numbers], object] = nothing
) -> Path:
    """A golden adapter whose base is found from anywhere, after these changes."""
    shutil.copytree(ADAPTERS / name, place)
    content = json.loads((place / "adapter_config.json").read_text())
    content["base_model_name_or_path"] = str(GOLDEN / name)
    config(content)
    (place / "adapter_config.json").write_text(json.dumps(content))
    numbers = load_file(place / "adapter_model.safetensors")
    tensors(numbers)
    save_file(numbers, place / "adapter_model.safetensors")
    return place


def asked(folder: Path, **knobs: str) -> Config:
    """The configuration of a run on tokens: not all of the folders have a tokenizer."""
    tokens = folder.parent / "tokens.bin"
    tokens.write_bytes(bytes(4000))
    given = {"init_from": str(folder), "mesh": "1x1x1", "precision": "float32", "data.path": str(tokens)}
    return load(None, given | knobs)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gpt2" else pytest.mark.slow) for n in READ])
def test_a_run_begins_with_what_peft_computes(name, tmp_path):
    config = asked(folder_of(name, tmp_path / "adapter"), mesh="2x1x1", **{"parallel.zero": "3"})
    tokens, theirs = peft_logits(name)
    tokens = np.repeat(tokens, 2, axis=0)
    run = Run(config, batch=False)
    run.steps = 1
    said: list[str] = []
    with jax.set_mesh(run.mesh):
        state = base_for(config, None).begin(run, source_of(config.init_from), said.append)

        @jax.jit
        def compute(params, tokens):
            return run.forward.logits(run.forward.weights(params), reshard(tokens, run.layout.activation("BS")))

        ours = np.asarray(compute(run.step.whole(state), tokens))[..., : config.model.vocab]
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    assert f"beside the adapters of {tmp_path}" in said[0]


def products(folder: Path, name: str) -> tuple[Numbers, Numbers]:
    """(what the arrays of a run add to the queries, keys and MLP of each layer; the same by PEFT's tensors)"""
    adapter = PeftAdapter(folder)
    plain = model_of(GOLDEN / name)
    model = plain.model_copy(update=adapter.knobs(plain))
    arrays = adapter.arrays(model)
    ours = {}
    for layer in range(model.layers):
        for module, target in (("self_attn", "q_proj"), ("self_attn", "k_proj"), ("mlp", "up_proj")):
            owner = {"self_attn": "attention"}.get(module, module)
            a, b = (arrays[f"blocks.{owner}.lora.{target}.{half}"][layer] for half in "ab")
            ours[f"{layer}.{module}.{target}"] = lora.scale(model) * np.tensordot(a, b, 1).reshape(len(a), -1)
    return ours, load_file(folder / "adapter_model.safetensors")


def test_ranks_scales_and_layers_may_differ_from_module_to_module(tmp_path):
    def config(content: dict) -> None:
        content |= {"use_rslora": True, "target_modules": "all-linear", "rank_pattern": {"q_proj": 2}}
        content["alpha_pattern"] = {"layers.1.self_attn.k_proj": 7, "mlp.up_proj": 3}

    def tensors(numbers: Numbers) -> None:
        for name in list(numbers):
            if "q_proj.lora_A" in name:
                numbers[name] = numbers[name][:2].copy()
            if "q_proj.lora_B" in name:
                numbers[name] = numbers[name][:, :2].copy()
            if "layers.0.mlp.up_proj" in name:
                del numbers[name]

    ours, theirs = products(folder_of("llama31", tmp_path / "adapter", config, tensors), "llama31")
    alphas = {"1.self_attn.k_proj": 7, "1.mlp.up_proj": 3}
    for module, product in ours.items():
        if module == "0.mlp.up_proj":
            assert not product.any()
            continue
        a, b = (theirs[f"base_model.model.model.layers.{module}.lora_{half}.weight"] for half in "AB")
        wanted = alphas.get(module, 12) / len(a) ** 0.5 * (b @ a).T
        np.testing.assert_allclose(product, wanted, rtol=1e-5, atol=1e-7, err_msg=module)


def test_the_request_has_the_rank_the_scale_and_the_targets(tmp_path):
    model = asked(folder_of("llama31", tmp_path / "adapter"), **{"model.lora_base": "nf4"}).model
    assert (model.lora_rank, model.lora_alpha, model.lora_targets, model.lora_base) == (4, 12.0, "", "nf4")
    assert model.family == "llama"
    some = asked(folder_of("qwen3_moe", tmp_path / "moe")).model
    assert (some.lora_rank, some.lora_targets) == (3, "q_proj,v_proj")


def with_table(numbers: Numbers) -> None:
    numbers["base_model.model.lm_head.weight"] = np.zeros((2, 2), np.float32)


def narrower(numbers: Numbers) -> None:
    name = next(name for name in numbers if "down_proj.lora_A" in name)
    numbers[name] = numbers[name][:, 1:].copy()


REFUSED = {
    "DoRA": (lambda c: c.update(use_dora=True), nothing, "use_dora true"),
    "biases": (lambda c: c.update(bias="lora_only"), nothing, 'bias "lora_only"'),
    "saved modules": (lambda c: c.update(modules_to_save=["lm_head"]), nothing, r'modules_to_save \["lm_head"\]'),
    "PiSSA": (lambda c: c.update(init_lora_weights="pissa"), nothing, 'init_lora_weights "pissa"'),
    "IA3": (lambda c: c.update(peft_type="IA3"), nothing, 'peft_type "IA3"'),
    "a new key": (lambda c: c.update(next_kind={"a": 1}), nothing, "next_kind"),
    "a table": (nothing, with_table, r"lm_head\.weight, which are not adapters of the weights"),
    "another shape": (nothing, narrower, "down_proj of another shape or dtype"),
    "no alpha": (lambda c: c.update(lora_alpha=0), nothing, "lora_alpha is 0, which must be a number above 0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_plain_adapter_of_the_base_is_refused_by_name(what, tmp_path):
    config, tensors, said = REFUSED[what]
    with pytest.raises(RequestError, match=said):
        asked(folder_of("llama31", tmp_path / "adapter", config, tensors))


def test_a_rank_of_its_own_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"lora_rank is 8, but the adapters in '.*' have 4; leave it out"):
        asked(folder_of("llama31", tmp_path / "adapter"), **{"model.lora_rank": "8"})


@dataclass(frozen=True)
class Whole:
    """A `Readable` of one block."""

    numbers: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def blocks(self, region: Region) -> Iterator[Block]:
        part = self.numbers[region]
        yield tuple(slice(0, size) for size in part.shape), part


def test_pairs_of_latent_attention_and_of_dense_layers_are_written_and_read_again(tmp_path):
    """Layers of both stacks have their own numbers at PEFT, and experts have no pair."""
    plain = model_of(GOLDEN / "deepseek_v3")
    model = plain.model_copy(update={"lora_rank": 2, "lora_alpha": 6.0})
    rng = np.random.default_rng(0)
    shapes = {path: shape for pair in pairs_of(model) for path, shape in pair.shapes(model).items()}
    ours = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    adapters = {path: Whole(array) for path, array in ours.items()}
    with pytest.raises(RequestError, match="gate_proj, up_proj, down_proj of layers without experts, and PEFT"):
        write_adapter(tmp_path, model, adapters, "float32", GOLDEN / "deepseek_v3")
    write_adapter(tmp_path, model, adapters, "float32", None)
    theirs = load_file(tmp_path / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.{}."
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    modules = {f"{layer.format(i)}self_attn.{name}" for i in range(model.layers) for name in attention}
    dense = range(model.dense_layers)
    modules |= {f"{layer.format(i)}mlp.{name}" for i in dense for name in ("gate_proj", "up_proj", "down_proj")}
    assert theirs.keys() == {f"{module}.lora_{half}.weight" for module in modules for half in "AB"}
    first, last = layer.format(0), layer.format(model.layers - 1)
    zeros = {pair.leaf.path: np.zeros(shape_of(pair.leaf, sizes_of(model)), np.float32) for pair in pairs_of(model)}
    base = {path: Whole(array) for path, array in zeros.items()}
    whole = merged(model, base, adapters, {path: array.dtype for path, array in zeros.items()})
    for number, stack in ((0, "dense"), (-1, "routed")):
        for name, weight in (("kv_b_proj", "kv_up"), ("kv_a_proj_with_mqa", "kv_down"), ("q_a_proj", "q_down")):
            module = f"{(first, last)[number]}self_attn.{name}"
            product = theirs[f"{module}.lora_B.weight"] @ theirs[f"{module}.lora_A.weight"]
            array = whole[f"blocks.{stack}.attention.{weight}"]
            found = read(array, tuple(slice(None) for _ in array.shape))[number]
            np.testing.assert_allclose(found.reshape(len(found), -1), 3 * product.T, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    # Experts have a gate_proj of their own.
    assert config["target_modules"] == [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    adapter = PeftAdapter(tmp_path)
    assert adapter.knobs(plain) == {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": ""}
    arrays = adapter.arrays(model)
    assert arrays.keys() == ours.keys()
    for path, array in ours.items():
        np.testing.assert_allclose(arrays[path], array, rtol=1e-6, err_msg=path)
