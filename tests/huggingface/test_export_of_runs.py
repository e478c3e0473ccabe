"""Folders that are written from runs on meshes: a pipeline, key/value heads on several devices, padded vocabularies."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdist import checkpoints, train
from tests.huggingface.exported import GOLDEN, model_of, tensors

OPTIONS = ["--precision=mixed", "--train.steps=1", "--train.global-batch-size=8", "--model.sequence=16"]
OPTIONS += [
    "--optimizer.learning-rate=1e-2",
    "--optimizer.warmup=0",
    "--validation.batches=1",
    "--log.tensorboard=false",
]


def trained(name: str, folder: Path, *options: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The f32 masters of a step from the golden folder, under our names, and the tensors of its exported folder."""
    source = shutil.copytree(GOLDEN / name, folder / "source")
    tokens = np.random.default_rng(0).integers(0, 90, 4000, np.uint16)
    tokens.tofile(folder / "tokens.bin")
    run = folder / "run"
    argv = [f"--init-from={source}", f"--run-dir={run}", f"--data.path={folder / 'tokens.bin'}", *OPTIONS, *options]
    assert train.main(argv) == 0
    # What the run keeps is enough.
    shutil.rmtree(source)
    assert checkpoints.main([str(run), f"--export={folder}/masters.safetensors"]) == 0
    assert checkpoints.main([str(run), f"--export={folder}/out/"]) == 0
    ours, theirs = (model_of(path) for path in (folder / "out", GOLDEN / name))
    # A size of heads that the folder leaves out is written.
    assert ours == theirs.model_copy(update={"head_dim": ours.head_dim})
    assert ours.head_size == theirs.head_size
    return load_file(folder / "masters.safetensors"), tensors(folder / "out")


def rounded_once(theirs: np.ndarray, masters: np.ndarray) -> None:
    assert theirs.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(theirs.view(np.uint16), masters.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.slow
def test_a_pipeline_whose_key_value_heads_are_on_two_devices_each(tmp_path):
    masters, theirs = trained("llama31", tmp_path, "--mesh=1x4x2")
    expected = tensors(GOLDEN / "llama31")
    assert theirs.keys() == expected.keys()
    for layer in range(2):
        # [D, K, G + 2, H] -> [K G H, D]
        qkv = masters[f"blocks.{layer}.attention.qkv"]
        queries = np.moveaxis(qkv[:, :, :-2], 0, -1).reshape(-1, qkv.shape[0])
        rounded_once(theirs[f"model.layers.{layer}.self_attn.q_proj.weight"], queries)
        for place, letter in ((-2, "k"), (-1, "v")):
            heads = np.moveaxis(qkv[:, :, place], 0, -1).reshape(-1, qkv.shape[0])
            rounded_once(theirs[f"model.layers.{layer}.self_attn.{letter}_proj.weight"], heads)
        rounded_once(theirs[f"model.layers.{layer}.mlp.down_proj.weight"], masters[f"blocks.{layer}.mlp.down"].T)
    rounded_once(theirs["lm_head.weight"], masters["output"])
    assert (theirs["lm_head.weight"] != expected["lm_head.weight"]).mean() > 0.5
    tokenizer = "tokenizer_config.json"
    assert (tmp_path / "out" / tokenizer).read_bytes() == (GOLDEN / "llama31" / tokenizer).read_bytes()


@pytest.mark.exhaustive
def test_experts_of_several_devices_are_tensors_of_their_own(tmp_path):
    masters, theirs = trained("mixtral", tmp_path, "--mesh=expert=2,model=2")
    expected = tensors(GOLDEN / "mixtral")
    assert theirs.keys() == expected.keys()
    for layer in range(2):
        ours = f"blocks.{layer}.mlp"
        mlp = f"model.layers.{layer}.block_sparse_moe"
        rounded_once(theirs[f"{mlp}.gate.weight"], masters[f"{ours}.router"].T)
        for expert in range(8):
            matrices = f"{mlp}.experts.{expert}"
            rounded_once(theirs[f"{matrices}.w1.weight"], masters[f"{ours}.gate_up"][expert, :, 0].T)
            rounded_once(theirs[f"{matrices}.w3.weight"], masters[f"{ours}.gate_up"][expert, :, 1].T)
            rounded_once(theirs[f"{matrices}.w2.weight"], masters[f"{ours}.down"][expert].T)
            assert (theirs[f"{matrices}.w1.weight"] != expected[f"{matrices}.w1.weight"]).mean() > 0.5


@pytest.mark.slow
def test_a_vocabulary_that_the_mesh_pads_has_its_own_rows(tmp_path):
    masters, theirs = trained("gpt2", tmp_path, "--mesh=1x2x1")
    assert theirs.keys() == tensors(GOLDEN / "gpt2").keys()
    assert theirs["transformer.wte.weight"].shape == (97, 64)
    rounded_once(theirs["transformer.wte.weight"], masters["table"])
    rounded_once(theirs["transformer.wpe.weight"], masters["positions"])
    qkv = masters["blocks.1.attention.qkv"]
    rounded_once(theirs["transformer.h.1.attn.c_attn.weight"], qkv.reshape(64, -1))
