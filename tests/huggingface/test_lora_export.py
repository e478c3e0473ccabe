"""LoRA runs for other programs: merged into the weights, and as an adapter that PEFT loads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import reshard
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxdist import checkpoints, evaluate, train
from jaxdist.config import RequestError
from jaxdist.huggingface import folder_arrays
from jaxdist.huggingface.folder_arrays import folder_arrays as opened
from jaxdist.huggingface.peft_adapter import write_adapter
from jaxdist.huggingface.readable import read
from jaxdist.huggingface.reading import read_parameters
from jaxdist.request import to_toml
from jaxdist.sharding import name_of
from jaxdist.training.export_marks import MARKER
from jaxdist.training.restore import restore
from tests.huggingface import by_transformers
from tests.huggingface.adapters import (
    ADAPTERS,
    NAMES,
    adapted_logits,
    lora_run,
    of_peft,
    peft_logits,
)
from tests.huggingface.exported import GOLDEN, abstract, model_of, run_from, tensors
from tests.huggingface.folders import changed
from tests.huggingface.golden import config_of, logits

BOUND = 1e-5
"""Largest difference, as a fraction of the largest logit."""

ROWS = [pytest.param(name, marks=[] if name == "llama31" else pytest.mark.slow) for name in NAMES]
"""Where logits are compiled, one folder is enough for the fast tests."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a LoRA run beside each golden folder that has adapters."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        lora_run(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def merged(runs, tmp_path_factory) -> Path:
    """The folders that they are exported to, merged, in float32."""
    folder = tmp_path_factory.mktemp("merged")
    for name in NAMES:
        export(runs / name, f"{folder / name}/", "--dtype=float32")
    return folder


def export(run: Path, out: Path | str, *more: str) -> None:
    assert checkpoints.main([str(run), f"--export={out}", *more]) == 0


def refused(run: Path, out: Path | str, *more: str) -> str:
    with pytest.raises(RequestError) as error:
        checkpoints.main([str(run), f"--export={out}", *more])
    (problem,) = error.value.problems
    return problem


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_adapter_is_the_one_that_peft_wrote(name, runs, tmp_path):
    export(runs / name, f"{tmp_path}/out/", "--adapter")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        MARKER,
    }
    theirs = of_peft(name)
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor, numbers in theirs.items():
        np.testing.assert_array_equal(ours[tensor], numbers, tensor, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_its_configuration_says_what_that_of_peft_says(name, runs, tmp_path):
    export(runs / name, f"{tmp_path}/out/", "--adapter")
    ours = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    theirs = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert ours.pop("base_model_name_or_path") == str(GOLDEN / name)
    ours["target_modules"].sort()
    assert ours == {key: theirs[key] for key in ours}


@pytest.mark.parametrize("name", ROWS)
def test_adapters_compute_what_peft_computes(name):
    tokens, theirs = peft_logits(name)
    assert difference(adapted_logits(name, tokens), theirs) <= BOUND


@pytest.mark.parametrize("name", ROWS)
def test_a_merged_folder_computes_the_same(name, merged):
    tokens, theirs = peft_logits(name)
    config = config_of(name).model_copy(update={"init_from": merged / name})
    assert difference(logits(config, tokens), theirs) <= BOUND


@pytest.mark.slow
def test_a_merged_folder_computes_what_a_run_does_beside_a_quantized_base(tmp_path):
    config = lora_run("llama31", tmp_path / "run", lora_base="nf4")
    export(tmp_path / "run", f"{tmp_path}/out/", "--dtype=float32")
    tokens, theirs = peft_logits("llama31")
    trained = restore(config, "latest", batch=False)
    run = trained.run
    with jax.set_mesh(run.mesh):

        @jax.jit
        def compute(params, tokens):
            return run.forward.logits(run.forward.weights(params), reshard(tokens, run.layout.activation("BS")))

        wanted = np.asarray(compute(trained.params, tokens))
    found = logits(config_of("llama31").model_copy(update={"init_from": tmp_path / "out"}), tokens)
    assert difference(found, wanted) <= BOUND
    assert difference(wanted, theirs) > 0.01, "nothing was quantized"


def test_the_merged_file_has_the_numbers_of_the_folder_and_needs_no_adapters(runs, merged, tmp_path):
    export(runs / "llama31", tmp_path / "out.safetensors")
    ours = load_file(tmp_path / "out.safetensors")
    theirs = tensors(merged / "llama31")
    for layer in range(2):
        down = theirs[f"model.layers.{layer}.mlp.down_proj.weight"]
        np.testing.assert_array_equal(ours[f"blocks.{layer}.mlp.down"], down.T)
    assert not any("lora" in name for name in ours)
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert "lora_rank = 0\n" in file.metadata()["config"]


def thirds(numbers: dict[str, np.ndarray]) -> None:
    """Make all numbers such that float32 rounds them, and bfloat16 to others."""
    for name, array in numbers.items():
        numbers[name] = array.astype(np.float32) / 3


@pytest.mark.parametrize(("base", "dtype"), [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)])
def test_the_sum_is_of_the_base_as_the_run_holds_it(base, dtype, tmp_path):
    source = changed("llama31", tmp_path / "source", thirds)
    lora_run("llama31", tmp_path / "run", source, lora_base=base)
    export(tmp_path / "run", f"{tmp_path}/out/", "--dtype=float32")
    merged = tensors(tmp_path / "out")
    theirs = of_peft("llama31")
    for name, numbers in tensors(source).items():
        held = numbers.astype(dtype).astype(np.float64)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in theirs:
            a, b = (theirs[f"{module}.lora_{half}.weight"].astype(np.float64) for half in "AB")
            held += 12 / 4 * b @ a
        np.testing.assert_allclose(merged[name], held, rtol=0, atol=1e-6, err_msg=name)


def test_the_sum_is_rounded_once_that_is_asked_for(runs, merged, tmp_path):
    export(runs / "llama31", f"{tmp_path}/out/", "--dtype=bfloat16")
    rounded = tensors(tmp_path / "out")
    for name, numbers in tensors(merged / "llama31").items():
        np.testing.assert_array_equal(rounded[name].view(np.uint16), numbers.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.slow
def test_the_base_may_be_another_run(merged, tmp_path):
    run_from(GOLDEN / "llama31", tmp_path / "base")
    lora_run("llama31", tmp_path / "run", tmp_path / "base")
    export(tmp_path / "run", f"{tmp_path}/merged/", "--dtype=float32")
    ours = tensors(tmp_path / "merged")
    for name, numbers in tensors(merged / "llama31").items():
        np.testing.assert_array_equal(ours[name], numbers, name)
    # PEFT cannot load a run.
    export(tmp_path / "run", f"{tmp_path}/out/", "--adapter")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


@pytest.mark.parametrize("targets", ["q_proj", "k_proj,v_proj"])
def test_gpt2_with_adapters_of_some_of_queries_keys_and_values(targets, tmp_path):
    run = tmp_path / "run"
    lora_run("gpt2", run, lora_targets=targets)
    export(run, f"{tmp_path}/adapter/", "--adapter")
    export(run, f"{tmp_path}/merged/", "--dtype=float32")
    halves = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "transformer.h.1.attn.c_attn"
    a, b = (halves[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    assert a.shape == (2 * len(targets.split(",")), 64)
    expected = tensors(GOLDEN / "gpt2")[f"{name}.weight"].astype(np.float32) + 2 * (b @ a).T
    np.testing.assert_allclose(tensors(tmp_path / "merged")[f"{name}.weight"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama31", "gpt2", "mixtral"])
def test_a_folder_is_read_in_parts_that_make_up_our_parameters(name, monkeypatch):
    monkeypatch.setattr(folder_arrays, "BLOCK", 700)
    model = model_of(GOLDEN / name)
    whole = read_parameters(GOLDEN / name, model, abstract(model))
    with opened(GOLDEN / name, model) as arrays:
        for path, numbers in jax.tree.leaves_with_path(whole):
            array = arrays[name_of(path)]
            # Some of the layers, and in each further dim all but the first place.
            region = tuple(slice(min(1, size - 1), size) for size in numbers.shape)
            np.testing.assert_array_equal(read(array, region), np.asarray(numbers)[region], name_of(path))
            if len(array.shape) == 3:
                assert all(block.size <= 700 for _, block in array.blocks(region)), name_of(path)


def test_another_dtype_of_an_adapter_can_be_asked_for(runs, tmp_path, capsys):
    export(runs / "llama31", f"{tmp_path}/out/", "--adapter", "--dtype=bfloat16")
    assert "28 tensors, 13,568 bytes of bfloat16 in 1 file, of step 1" in capsys.readouterr().out
    assert {array.dtype for array in tensors(tmp_path / "out").values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_an_exported_adapter_is_replaced_only_when_told_to(runs, tmp_path):
    out = tmp_path / "out"
    export(runs / "llama31", f"{out}/", "--adapter")
    problem = refused(runs / "llama31", out, "--adapter")
    assert problem == f"--export '{out}' is an earlier export; name another, or add --force to replace it"
    export(runs / "gpt2", out, "--adapter", "--force")
    assert load_file(out / "adapter_model.safetensors").keys() == of_peft("gpt2").keys()


def test_a_run_without_adapters_has_none_to_export(tmp_path):
    run_from(GOLDEN / "llama31", tmp_path / "run")
    problem = refused(tmp_path / "run", f"{tmp_path}/out/", "--adapter")
    assert problem.startswith("--adapter is for the adapters of a LoRA run, and the run in ")


def test_an_adapter_is_a_folder(runs, tmp_path):
    problem = refused(runs / "llama31", tmp_path / "out.safetensors", "--adapter")
    assert problem == f"--adapter writes a folder, and --export is '{tmp_path}/out.safetensors'; add --export FOLDER/"
    with pytest.raises(RequestError, match="--export is ''"):
        checkpoints.main([str(runs / "llama31"), "--adapter"])


def test_adapters_of_another_model_are_refused_by_name(runs, tmp_path):
    config = lora_run("llama31", tmp_path)
    model = config.model.model_copy(update={"lora_rank": 8, "lora_targets": "q_proj"})
    (tmp_path / "config.toml").write_text(to_toml(config.model_copy(update={"model": model})))
    with pytest.raises(RequestError) as error:
        checkpoints.main([str(tmp_path), f"--export={tmp_path}.out/", "--adapter"])
    told = "\n".join(error.value.problems)
    assert "blocks.attention.lora.q_proj.a of shape (2, 64, 4), and the run's config.toml means (2, 64, 8)" in told
    assert "blocks.mlp.lora.up_proj.b of shape (2, 4, 1, 80), and the run's config.toml means None" in told


def test_another_base_and_a_missing_one_are_refused(tmp_path):
    source = changed("llama31", tmp_path / "source")
    lora_run("llama31", tmp_path / "run", source)
    weights = source / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for target in ("out/", "out.safetensors"):
        problem = refused(tmp_path / "run", f"{tmp_path}/{target}")
        assert f"the adapters were trained beside {source} of digest " in problem
        assert f"but {source} has digest " in problem
    weights.unlink()
    (source / "config.json").unlink()
    source.rmdir()
    assert f"but there is nothing at {source}; put " in refused(tmp_path / "run", f"{tmp_path}/out/")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    # An adapter does not need it.
    export(tmp_path / "run", f"{tmp_path}/out/", "--adapter")


def test_adapters_of_peft_are_no_weights_by_themselves(tmp_path, monkeypatch):
    adapters = shutil.copytree(ADAPTERS / "llama31", tmp_path / "adapters")
    problem = f"{adapters}' holds adapters of PEFT (adapter_config.json), which are no weights by themselves; begin "
    with pytest.raises(RequestError, match=re.escape(problem)):
        evaluate.main([str(adapters)])
    # Their base is named by a path from the root of the repository, and is not here.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=re.escape(problem)):
        train.main([f"--init-from={adapters}", f"--run-dir={tmp_path / 'run'}"])


@pytest.mark.slow
def test_the_merged_folder_of_a_trained_run_has_its_validation_loss(tmp_path, capsys):
    np.random.default_rng(0).integers(0, 90, 4000, np.uint16).tofile(tmp_path / "tokens.bin")
    run = tmp_path / "run"
    options = ["--train.steps=2", "--train.global-batch-size=8", "--model.sequence=16", "--validation.every=2"]
    options += ["--optimizer.learning-rate=1e-1", "--optimizer.warmup=0", "--log.tensorboard=false"]
    options += ["--model.lora-rank=2", "--mesh=1x4x1", "--precision=float32"]
    data = f"--data.path={tmp_path}/tokens.bin"
    assert train.main([f"--init-from={GOLDEN / 'llama31'}", f"--run-dir={run}", data, *options]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (loss,) = [line["validation_loss"] for line in lines if "validation_loss" in line and line["step"] == 2]
    export(run, f"{tmp_path}/out/", "--dtype=float32")
    capsys.readouterr()
    assert evaluate.main([f"{tmp_path}/out", data, "--model.sequence=16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss, rel=1e-5)
    base = tensors(GOLDEN / "llama31")
    for name, numbers in tensors(tmp_path / "out").items():
        assert (np.abs(numbers - base[name].astype(np.float32)).max() > 1e-3) == ("_proj" in name), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_peft_loads_an_exported_adapter_and_computes_the_same(name, runs, tmp_path):
    pytest.importorskip("peft")
    export(runs / name, f"{tmp_path}/out/", "--adapter")
    by_transformers.check_adapter(tmp_path / "out", *peft_logits(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_a_merged_folder_and_computes_the_same(name, merged):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    by_transformers.check_logits(merged / name, *peft_logits(name))


def test_adapters_beside_fused_tensors_are_merged_or_refused(tmp_path):
    with pytest.raises(RequestError, match=r"q_proj, k_proj and v_proj in one tensor.*leave out --adapter"):
        write_adapter(tmp_path, model_of(GOLDEN / "phi4_mini"), {}, "float32", GOLDEN / "phi4_mini")
